"""Tokens are written where they arrive; a stream's task has its turn only at the beginning, at the end, or behind."""

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from quire.ipc.messages import Command, Progress, Update
from quire.request import FinishReason, Request, SamplingParams
from quire.server.http.sse import to_json, token_template
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.open_prompt import TokenDelta
from quire.server.service.service import Service
from quire.server.settings import ServerSettings
from tests import web
from tests.server.vocabulary import served_model

MODEL = served_model()


class Engine:
    """A port whose engine says what the test makes it say."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def request_id(self, count: int) -> int:
        return count

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def close(self) -> None: ...


def open_stream(service: Service):
    return service.open([GenerationSpec(Request(0, (1, 2), 100, SamplingParams()))])


def progress(token: int, finish: FinishReason | None = None) -> list[Progress]:
    return [Progress([Update(1, 0, [token], finish, 0, None, None)])]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30))
def test_every_delta_comes_once_and_in_order_however_the_client_keeps_up(schedule):
    """`schedule`: for each token, whether the client is behind, and whether the task gets a turn after it."""

    async def run() -> tuple[list[int], list[int]]:
        service = Service(MODEL, ServerSettings())
        service.connect(Engine())
        stream = open_stream(service)
        is_behind = False
        seen: list[int] = []

        def sink(deltas: list[TokenDelta]) -> bool:
            if not is_behind:
                seen.extend(delta.token for delta in deltas if delta.token is not None)
            return not is_behind

        async def reader() -> None:
            while deltas := await stream.read(sink):
                seen.extend(delta.token for delta in deltas if delta.token is not None)

        task = asyncio.create_task(reader())
        await asyncio.sleep(0)
        for token, (behind, has_turn) in enumerate(schedule):
            is_behind = behind
            service.on_messages(progress(token))
            if has_turn:
                await asyncio.sleep(0)
        service.on_messages(progress(len(schedule), FinishReason.LENGTH))
        await task
        assert stream.is_over
        return seen, list(range(len(schedule) + 1))

    seen, made = asyncio.run(run())
    assert seen == made


def test_while_the_client_keeps_up_no_task_has_a_turn():
    async def run() -> None:
        service = Service(MODEL, ServerSettings())
        service.connect(Engine())
        stream = open_stream(service)
        seen: list[TokenDelta] = []
        reading = asyncio.create_task(stream.read(lambda deltas: seen.extend(deltas) or True))
        await asyncio.sleep(0)
        for token in range(5):
            service.on_messages(progress(token))
            assert len(seen) == token + 1
        assert not reading.done()
        stream.close()
        assert await reading == []

    asyncio.run(run())


def test_a_stream_that_cannot_be_written_fails_alone():
    async def run() -> None:
        service = Service(MODEL, ServerSettings())
        service.connect(Engine())
        broken, sound = open_stream(service), open_stream(service)

        def raises(deltas: list[TokenDelta]) -> bool:
            raise ZeroDivisionError

        seen: list[TokenDelta] = []
        failing = asyncio.create_task(broken.read(raises))
        reading = asyncio.create_task(sound.read(lambda deltas: seen.extend(deltas) or True))
        await asyncio.sleep(0)
        both = [Update(number, 0, [5], None, 0, None, None) for number in (1, 2)]
        service.on_messages([Progress(both)])
        await asyncio.wait({failing})
        assert "internal error" in str(failing.exception())
        assert [delta.token for delta in seen] == [5]
        sound.close()
        await reading

    asyncio.run(run())


@given(st.text(), st.integers(0, 9))
def test_templates_take_any_text_and_any_name(text, index):
    head = b'{"model":' + to_json(f"50%d%%{text}") + b',"index":'
    assert json.loads(token_template(head, b',"text":', b"}") % (index, to_json(text))) == {
        "model": f"50%d%%{text}", "index": index, "text": text,
    }  # fmt: skip


def test_several_steps_that_come_together_are_still_an_event_for_each_token(server):
    body = {"prompt": [3, 4], "max_tokens": 12, "stream": True, "temperature": 0, "ignore_eos": True}
    lines = web.post(f"{server.url}/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(chunks) == 12
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == server.expected_text([3, 4], 12)
