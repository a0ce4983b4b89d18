"""The engine behind a socket: whoever is connected gets what it asked for, and whoever leaves is cleaned up after."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.scheduler import Scheduler
from quire.engine.driver import Phase
from quire.engine.engine import Engine
from quire.errors import UnsupportedModel
from quire.ipc.client import EngineClient, connect
from quire.ipc.framing import Frames, frame
from quire.ipc.messages import Broken, Described, Failed, Progress, Ready, Started, Stats, Submit, ToFrontEnd
from quire.request import FinishReason
from quire.server.processes.engine_process import EngineProcess
from tests.core.harness import limits, request
from tests.fake_executor import FakeExecutor, expected_tokens
from tests.patience import WAIT_S
from tests.server.gate import Gate


def build(describe: Callable[[Described], None], before_result: Callable[..., object] = lambda *_: None) -> Engine:
    describe(Described("fake", None, (2,), {"temperature": 0.5}))
    chosen = limits(num_pages=400, max_batch_size=8)
    executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, None, before_result)
    executor.num_late, executor.num_unfinished = 3, 5
    return Engine(Scheduler(chosen, time.monotonic), executor)


_numbers = count(1)


class Front:
    """A front end that remembers what it is told."""

    def __init__(self) -> None:
        self.messages: list[ToFrontEnd] = []
        self.reason: str | None = None
        self.client: EngineClient

    async def join(self, path: Path) -> "Front":
        self.client = await connect(str(path), next(_numbers), self.messages.extend, self._lost)
        return self

    def _lost(self, reason: str) -> None:
        self.reason = reason

    def of(self, kind: type) -> list:
        return [message for message in self.messages if isinstance(message, kind)]

    def tokens(self, request_id: int) -> list[int]:
        updates = [update for progress in self.of(Progress) for update in progress.updates]
        return [token for update in updates if update.request_id == request_id for token in update.tokens]

    def finished(self, request_id: int) -> bool:
        updates = [update for progress in self.of(Progress) for update in progress.updates]
        return any(update.request_id == request_id and update.finish is FinishReason.LENGTH for update in updates)


async def until(holds: Callable[[], bool], gate: Gate | None = None) -> None:
    """`gate`: the engine takes one step at a time meanwhile."""
    async with asyncio.timeout(WAIT_S):
        while not holds():
            if gate is not None:
                gate.let(1)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(path: Path, builder: Callable[..., Engine] = build) -> AsyncIterator[EngineProcess]:
    process = EngineProcess(str(path), builder)
    task = asyncio.create_task(process.run())
    try:
        yield process
    finally:
        process.stop()
        await asyncio.wait_for(task, WAIT_S)


def test_a_front_end_is_told_what_the_model_is_and_gets_its_answers(tmp_path):
    async def run() -> None:
        async with running(tmp_path / "engine"):
            front = await Front().join(tmp_path / "engine")
            await until(lambda: bool(front.of(Ready)))
            assert front.of(Described) == [Described("fake", None, (2,), {"temperature": 0.5})]
            assert front.of(Ready)[0].max_total_tokens == 64
            asked = [request(front.client.request_id(n), prompt=(n, 1), max_tokens=6, samples=1) for n in range(1, 5)]
            for one in asked:
                front.client.send(Submit(one))
            await until(lambda: all(front.finished(one.request_id) for one in asked))
            for one in asked:
                assert front.tokens(one.request_id) == expected_tokens(one)
            started = front.of(Started)
            assert sorted(one.request_id for one in started) == [one.request_id for one in asked]
            assert all(0 <= one.queue_s < WAIT_S for one in started)
            await until(lambda: bool(front.of(Stats)) and front.of(Stats)[-1].counters["admissions"] == 4)
            counters = front.of(Stats)[-1].counters
            assert (counters["late_compilations"], counters["unfinished_programs"]) == (3, 5)

    asyncio.run(run())


def test_what_a_front_end_that_dies_had_asked_for_is_aborted_and_others_go_on(tmp_path):
    async def run() -> None:
        gate = Gate()
        async with running(tmp_path / "engine", lambda describe: build(describe, gate)) as process:
            dying, staying = await Front().join(tmp_path / "engine"), await Front().join(tmp_path / "engine")
            await until(lambda: bool(dying.of(Ready) and staying.of(Ready)))
            for n in range(1, 5):
                dying.client.send(Submit(request(dying.client.request_id(n), prompt=(n, 2), max_tokens=60)))
            kept = request(staying.client.request_id(1), max_tokens=40)
            staying.client.send(Submit(kept))
            await until(lambda: len(staying.tokens(kept.request_id)) > 2, gate)
            dying.client._transport.abort()
            scheduler = process.engine.scheduler
            await until(lambda: scheduler.num_requests == 1, gate)
            gate.open()
            await until(lambda: staying.finished(kept.request_id))
            assert staying.tokens(kept.request_id) == expected_tokens(kept)
            assert dying.reason is not None

    asyncio.run(run())


def test_a_process_that_stood_still_does_not_hold_the_time_against_its_steps(tmp_path):
    async def run() -> None:
        may_end = threading.Event()
        async with running(tmp_path / "engine", lambda describe: build(describe, lambda *_: may_end.wait())) as process:
            front = await Front().join(tmp_path / "engine")
            await until(lambda: bool(front.of(Ready)))
            front.client.send(Submit(request(front.client.request_id(1), max_tokens=1)))
            await until(lambda: process._waited_s(process.engine) > 0.5)
            before_s = process._waited_s(process.engine)
            time.sleep(1.2)  # the loop does not turn, as when the process is stopped
            assert process._waited_s(process.engine) < before_s + 1.2
            # A step that goes on is timed again.
            await until(lambda: process._waited_s(process.engine) > 0.15)
            may_end.set()

    asyncio.run(run())


def test_a_check_of_the_device_that_hangs_is_told_to_the_supervisor_and_to_front_ends(tmp_path):
    release = threading.Event()

    def build_hanging(describe: Callable[[Described], None]) -> Engine:
        describe(Described("fake", None, (2,), {}))
        chosen = limits(num_pages=400, max_batch_size=8)
        executor = FakeExecutor(chosen.num_pages, chosen.page_size, 8, before_check=lambda: release.wait(WAIT_S))
        return Engine(Scheduler(chosen, time.monotonic), executor)

    async def run() -> None:
        async with running(tmp_path / "engine", build_hanging) as process:
            front = await Front().join(tmp_path / "engine")
            await until(lambda: bool(front.of(Ready)))
            assert process.engine.checking_s is None
            checking = asyncio.create_task(asyncio.to_thread(process.engine.check_device))
            await until(lambda: process._waited_s(process.engine) > 0.1)
            assert process.engine.checking_s is not None
            await until(lambda: any(one.checking_s is not None for one in front.of(Stats)))
            release.set()
            await checking
            assert process._waited_s(process.engine) == 0
            await until(lambda: front.of(Stats)[-1].checking_s is None)

    asyncio.run(run())


def test_a_front_end_that_sends_nonsense_is_dropped_and_others_go_on(tmp_path):
    async def run() -> None:
        async with running(tmp_path / "engine"):
            front = await Front().join(tmp_path / "engine")
            await until(lambda: bool(front.of(Ready)))
            for nonsense in (b"\xff\xff\xff\xff", b"\x03\0\0\0abc", frame([["Submit", "x"]]), frame({"a": 1})):
                reader, writer = await asyncio.open_unix_connection(str(tmp_path / "engine"))
                writer.write(nonsense)
                async with asyncio.timeout(WAIT_S):
                    with contextlib.suppress(ConnectionError):
                        while await reader.read(4096):
                            pass
                writer.close()
            asked = request(front.client.request_id(1))
            front.client.send(Submit(asked))
            await until(lambda: front.finished(asked.request_id))

    asyncio.run(run())


def test_stopping_fails_the_requests_that_wait(tmp_path):
    async def run() -> None:
        gate = Gate()
        async with running(tmp_path / "engine", lambda describe: build(describe, gate)) as process:
            front = await Front().join(tmp_path / "engine")
            await until(lambda: bool(front.of(Ready)))
            front.client.send(Submit(request(front.client.request_id(1), max_tokens=60)))
            await until(lambda: bool(front.of(Progress)), gate)
            process.stop()
            await until(lambda: process.driver.phase is Phase.DRAINING)
            gate.open()
        await until(lambda: bool(front.of(Failed)))
        assert front.of(Failed)[0].kind == "engine_stopped"

    asyncio.run(run())


def test_front_ends_that_connect_later_also_get_the_reason_why_an_engine_cannot_be_built(tmp_path):
    def refuse(describe: Callable[[Described], None]) -> Engine:
        raise UnsupportedModel("too many heads")

    async def run() -> None:
        async with running(tmp_path / "engine", refuse):
            early = await Front().join(tmp_path / "engine")
            await until(lambda: bool(early.of(Broken)))
            late = await Front().join(tmp_path / "engine")
            await until(lambda: bool(late.of(Broken)))
            assert early.of(Broken) == late.of(Broken) == [Broken("unsupported_model", "too many heads")]

    asyncio.run(run())


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=5), max_size=8), st.data())
def test_frames_come_out_as_they_went_in_however_they_are_cut(messages, data):
    stream = b"".join(frame(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    frames, found = Frames(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += [msgspec.msgpack.decode(payload) for payload in frames.feed(stream[start:end])]
    assert found == messages


def test_a_frame_of_absurd_length_is_an_error():
    with pytest.raises(ValueError, match="the limit is"):
        Frames().feed(b"\xff\xff\xff\xff")
