"""Streams before their first token, and while none comes: headers and comments, which keep connections open."""

import asyncio
import json
import socket
from collections.abc import Iterator
from time import sleep

import anthropic
import huggingface_hub
import openai
import pytest

from quire.server.http.connection import Connection
from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.gate import Gate
from tests.server.running import RunningServer
from tests.server.vocabulary import served_model

LONG = {"prompt": "abc", "max_tokens": 500, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8}
STREAMS = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 8, "temperature": 0, "stream": True},
    "/v1/chat/completions": CHAT | {"stream": True},
    "/v1/messages": CHAT | {"model": "default", "stream": True},
    "/v1/responses": {"input": "abc", "max_output_tokens": 16, "stream": True},
    "/generate_stream": {"inputs": "abc", "parameters": {"max_new_tokens": 8}},
}


class Talkative(Connection):
    """A connection on which silence is short."""

    max_silence_s = 0.02


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.mark.parametrize(("path", "body"), STREAMS.items(), ids=STREAMS)
def test_headers_come_while_a_request_waits_for_its_slot(make_server, gate, path, body):
    server = make_server(before_result=gate, max_batch_size=1)
    with web.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True, "max_tokens": 300}) as first:
        assert first.status_code == 200, "it has its slot, and no token yet"

        async def ask() -> None:
            async with web.AsyncClient() as client:
                asking = asyncio.create_task(
                    client.send(client.build_request("POST", server.url + path, json=body), stream=True)
                )
                while not asking.done():  # steps of the first: the queue is looked at between them
                    gate.let(1)
                    await asyncio.sleep(0.01)
                answer = asking.result()
                assert (answer.status_code, answer.headers["content-type"][:17]) == (200, "text/event-stream")
                assert server.driver.engine.scheduler.num_waiting == 1, "it waits"
                gate.open()
                events = [line async for line in answer.aiter_lines() if line.startswith("data:")]
                assert len(events) > 2
                await answer.aclose()

        asyncio.run(ask())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("path", "body"), STREAMS.items(), ids=STREAMS)
def test_an_error_after_the_headers_is_an_event_of_the_api(make_server, gate, path, body, strict):
    server = make_server(settings=ServerSettings(tgi_strict=strict), before_result=gate, max_batch_size=1)
    with web.stream("POST", server.url + path, json=body) as answer:
        assert answer.status_code == 200
        stop = asyncio.run_coroutine_threadsafe(server.service.drain(0.01), server.loop)
        lines = [line for line in answer.iter_lines() if line]
        stop.result(WAIT_S)
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    texts = [line.partition(":")[2].strip() for line in lines if line.startswith("data:")]
    events = [json.loads(text) for text in texts if text != "[DONE]"]
    reason = "the server shut down; 0.01 s were given to finish"
    if path == "/v1/messages":
        assert (kinds, events[0]["error"]) == (["error"], {"type": "overloaded_error", "message": reason})
    elif path == "/v1/responses":
        assert kinds == ["response.created", "response.in_progress", "error", "response.failed"]
        assert events[-1]["response"]["error"]["message"] == reason
    elif path == "/generate_stream":
        assert events[0]["error"] == reason
    else:
        assert events[0]["error"]["message"] == reason
    assert len(events) == (4 if path == "/v1/responses" else 1)


def test_comments_are_written_while_nothing_else_is(make_server, gate):
    server = make_server(before_result=gate, connection=Talkative)
    expected = server.expected_text(server.model.tokenizer.encode("abc"), 40)
    with web.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True, "max_tokens": 40}) as answer:
        lines = answer.iter_lines()
        found = [next(lines) for _ in range(4)]
        assert found == [":", "", ":", ""], "before the first token"
        gate.let(3)
        while not found[-1].startswith("data:"):
            found.append(next(lines))
        while found[-1] != ":":  # between two tokens
            found.append(next(lines))
        gate.open()
        found += lines
    events = [line.removeprefix("data: ") for line in found if line.startswith("data:")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected
    assert {line for line in found if not line.startswith("data:")} == {"", ":"}


def test_a_stream_that_flows_has_no_comments(make_server):
    server = make_server(settings=ServerSettings())
    for path, body in STREAMS.items():
        lines = web.post(server.url + path, json=body).text.splitlines()
        assert not any(line.startswith(":") for line in lines)


def test_comments_reach_a_client_of_http_1_0(make_server, gate):
    """Its answers have no chunks."""
    server = make_server(before_result=gate, connection=Talkative)
    body = json.dumps(STREAMS["/generate_stream"]).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as one:
        one.sendall(b"POST /generate_stream HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        answer = one.makefile("rb")
        while answer.readline() != b"\r\n":
            pass
        assert [answer.readline() for _ in range(4)] == [b":\n", b"\n", b":\n", b"\n"]
        gate.open()
        assert b"generated_text" in answer.read()


# Clients


@pytest.fixture(params=[False, True], ids=["plain", "strict"])
def halting(make_server, request) -> RunningServer:
    """One with comments between tokens."""
    settings = ServerSettings(tgi_strict=request.param)
    model = served_model(end_ids=(0,))
    return make_server(before_result=lambda *_: sleep(0.05), connection=Talkative, settings=settings, model=model)


def test_clients_of_openai_read_past_them(halting):
    client = openai.OpenAI(base_url=f"{halting.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0)
    chat = list(client.chat.completions.create(model="default", stream=True, **CHAT))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat)
    assert chat[-1].choices[0].finish_reason
    assert list(client.completions.create(model="default", prompt="abc", max_tokens=8, stream=True))
    assert list(client.responses.create(model="default", input="abc", max_output_tokens=16, stream=True))


def test_clients_of_anthropic_read_past_them(halting):
    client = anthropic.Anthropic(base_url=halting.url, api_key="none", timeout=WAIT_S, max_retries=0)
    with client.messages.stream(model="default", **CHAT) as stream:
        assert stream.get_final_message().stop_reason


def test_clients_of_text_generation_inference_read_past_them(halting):
    async def ask() -> list:
        client = huggingface_hub.AsyncInferenceClient(halting.url, timeout=WAIT_S)
        parts = await client.text_generation("abc", max_new_tokens=8, stream=True, details=True)
        return [part async for part in parts]

    assert asyncio.run(ask())[-1].details is not None
    text_generation = pytest.importorskip("text_generation")

    async def ask_older() -> list:
        client = text_generation.AsyncClient(halting.url, timeout=int(WAIT_S))
        return [part async for part in client.generate_stream("abc", max_new_tokens=8)]

    assert asyncio.run(ask_older())[-1].details is not None
    parts = list(text_generation.Client(halting.url, timeout=int(WAIT_S)).generate_stream("abc", max_new_tokens=8))
    assert parts[-1].details is not None
