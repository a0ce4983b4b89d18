"""A defect of ours that shows in one request ends that request, and no other."""

import asyncio
import json
import logging
from dataclasses import replace

import pytest
from starlette.requests import Request as HttpRequest

from quire.errors import QuireError
from quire.ipc.messages import Abort, Command, Progress, Submit, Update
from quire.request import FinishReason, Request, SamplingParams
from quire.server.api.job import Job, answer
from quire.server.api.openai.dialect import OPENAI
from quire.server.caller import key_name, request_id
from quire.server.http.body import Body
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.service import Service
from quire.server.settings import ServerSettings
from quire.text.token_text import Piece
from quire.text.tokenizer import Tokenizer
from tests import web
from tests.server.vocabulary import PIECES, served_model

PROMPT = (1, 2, 3)


class Engine:
    """A port whose engine says what the test makes it say."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def request_id(self, count: int) -> int:
        return count

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def close(self) -> None: ...


class BreaksAtOnce:
    """A search for stop strings that has a defect."""

    def __init__(self, stops: object, include: bool) -> None:
        raise ZeroDivisionError("a defect at the beginning")


class BreaksLater:
    def __init__(self, stops: object, include: bool) -> None: ...

    def push(self, text: str) -> tuple[str, str | None]:
        raise ZeroDivisionError("a defect in the middle")

    def flush(self) -> tuple[str, str | None]:
        return "", None


class Spans:
    """Tracing that has a defect."""

    def open(self, *_: object) -> None:
        raise ZeroDivisionError("a defect of tracing")


def spec(stop_search=None) -> GenerationSpec:
    asked = Request(0, PROMPT, 100, SamplingParams())
    return GenerationSpec(asked) if stop_search is None else GenerationSpec(asked, ("x",), stop_search=stop_search)


def step(*numbers: int, finish: FinishReason | None = None) -> list[Progress]:
    return [Progress([Update(number, 0, [5], finish, 0, None, None) for number in numbers])]


def new_service(**settings: object) -> tuple[Service, Engine]:
    service, engine = Service(served_model(), ServerSettings(**settings)), Engine()  # type: ignore[arg-type]
    service.connect(engine)
    return service, engine


def keyed(service: Service) -> str:
    """The caller has the only key. Returns the tokens that are left to it."""
    (key,) = service.settings.keys
    key_name.set(key.name)
    return service.limits.headers(key.name)["x-ratelimit-remaining-tokens"]


def aborted(engine: Engine) -> list[int]:
    return [command.request_id for command in engine.commands if isinstance(command, Abort)]


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The ids of requests whose defects are logged."""
    return [record.request_id for record in caplog.records if record.exc_info is not None]


def test_a_defect_in_the_tokens_of_one_stream_ends_that_stream(caplog):
    async def run() -> None:
        service, engine = new_service(max_concurrent_requests=2)
        request_id.set("req-broken")
        broken = service.open([spec(BreaksLater)])
        request_id.set("req-sound")
        sound = service.open([spec()])
        service.on_messages(step(1, 2))
        with pytest.raises(QuireError, match="internal error"):
            await broken.read()
        assert [delta.token for delta in await sound.read()] == [5]
        assert aborted(engine) == [1]
        assert service.num_streams == 1
        service.open([spec()]).close()  # its place is free
        service.on_messages(step(1, 2, finish=FinishReason.LENGTH))
        assert len(await sound.read()) == 1
        sound.close()
        assert service.num_streams == 0
        assert not service.engines.prompts

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert tracebacks(caplog) == ["req-broken"]


def test_the_tokens_before_a_defect_are_still_read():
    async def run() -> None:
        service, _ = new_service()
        stream = service.open([spec(), spec(BreaksLater)])
        service.on_messages(step(1, 2))
        assert [delta.prompt for delta in await stream.read()] == [0]
        with pytest.raises(QuireError, match="internal error"):
            await stream.read()

    asyncio.run(run())


def test_a_request_that_breaks_as_it_opens_leaves_nothing_behind(caplog):
    async def run() -> None:
        service, engine = new_service(max_concurrent_requests=2, api_key="a", key_tokens_per_minute=6)
        assert keyed(service) == "6"
        with pytest.raises(QuireError, match="internal error"):
            service.open([spec(), spec(BreaksAtOnce)])
        assert service.num_streams == 0
        assert not service.engines.prompts
        assert aborted(engine) == [1]
        assert keyed(service) == "6"
        service.open([spec(), spec()]).close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert len(tracebacks(caplog)) == 1


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_that_cannot_be_written_leaves_nothing_behind(caplog, streams):
    def breaks(*_: object) -> object:
        raise ZeroDivisionError("a defect of an encoder")

    def parse(*_: object) -> Job:
        return Job(specs=[spec()], body=breaks, events=breaks, num_characters=3)

    async def run() -> None:
        service, engine = new_service(max_concurrent_requests=1, api_key="a", key_tokens_per_minute=60)
        keyed(service)
        never = asyncio.get_running_loop().create_future()
        request = HttpRequest({"type": "http", "headers": []}, lambda: never)
        answering = asyncio.create_task(
            answer(service, request, Body({}, 0), parse, OPENAI, name="completions", streams=streams)
        )
        while not any(isinstance(command, Submit) for command in engine.commands):
            await asyncio.sleep(0)
        service.on_messages(step(1, finish=FinishReason.LENGTH))
        with pytest.raises(QuireError, match="internal error"):
            await answering
        assert service.num_streams == 0
        assert not service.engines.prompts
        service.open([spec()], Arrival({})).close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert len(tracebacks(caplog)) == 1


def test_a_defect_of_tracing_ends_the_tracing_alone(caplog):
    async def run() -> None:
        service, _ = new_service()
        service.tracing = Spans()  # type: ignore[assignment]
        service.open([spec()]).close()
        assert service.tracing is None

    asyncio.run(run())
    assert sum(record.exc_info is not None for record in caplog.records) == 1


class Breaking(Tokenizer):
    """It has a defect that one of its tokens shows."""

    broken = 0

    def _piece_of(self, token_id: int) -> Piece:
        if token_id == self.broken:
            raise ZeroDivisionError("a defect of the tokenizer")
        return super()._piece_of(token_id)


@pytest.mark.parametrize(
    ("path", "body", "status", "shown"),
    [
        ("/v1/completions", {"prompt": "TEXT", "max_tokens": 20}, 500, '"type":"server_error"'),
        ("/v1/completions", {"prompt": "TEXT", "max_tokens": 20, "stream": True}, 200, '"type":"server_error"'),
        ("/generate", {"inputs": "TEXT", "parameters": {"max_new_tokens": 20}}, 500, '"error_type":"incomplete_gen'),
        (
            "/generate_stream",
            {"inputs": "TEXT", "parameters": {"max_new_tokens": 20}},
            200,
            '"error_type":"incomplete_generation"',
        ),
    ],
)
def test_its_client_gets_an_error_of_its_api_and_the_others_go_on(make_server, caplog, path, body, status, shown):
    model = served_model()
    tokenizer = Breaking(model.tokenizer._backend, model.tokenizer.special_tokens)
    server = make_server(model=replace(model, tokenizer=tokenizer))
    sound, prompts = [5, 6], ([one, two] for one in range(1, 27) for two in range(1, 27))
    others = {*server.expected(sound, 40)}
    prompt = next(one for one in prompts if server.expected(one, 4)[-1] not in {*others, *server.expected(one, 3)})
    tokenizer.broken = server.expected(prompt, 4)[-1]
    text = "".join(PIECES[token] for token in prompt)
    asked = json.loads(json.dumps(body | {"temperature": 0} if "prompt" in body else body).replace("TEXT", text))
    with web.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"prompt": sound, "max_tokens": 40, "stream": True, "temperature": 0},
    ) as going_on:
        answer = web.post(server.url + path, json=asked)
        lines = list(going_on.iter_lines())
    assert (answer.status_code, shown in answer.text) == (status, True)
    assert "ZeroDivisionError" not in answer.text
    assert "data: [DONE]" in lines
    assert tracebacks(caplog) == [answer.headers["x-request-id"]]
    server.wait_until(lambda: server.service.num_streams == 0)
    assert server.service.metrics.failures["incomplete"] == 1
    assert server.service.metrics.numbers["tgi_request_success"] == 1
