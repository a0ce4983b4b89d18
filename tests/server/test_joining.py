"""A front end that starts while engines come and go."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from quire.engine.engine import Engine
from quire.errors import InvalidSetting
from quire.ipc.client import EngineClient
from quire.ipc.framing import frame
from quire.ipc.messages import AdapterTable, Described, Ready, ToFrontEnd, Waiting
from quire.ipc.supervisor_link import GaveUp
from quire.server.processes.engine_line import EngineLine
from quire.server.processes.engine_process import EngineProcess
from quire.server.processes.front_end import FrontEnd
from quire.server.settings import ServerSettings
from quire.text.chat import ChatTemplates
from quire.text.tokenizer import Tokenizer
from tests.patience import WAIT_S
from tests.server.fake_engine import FakeEngine
from tests.server.vocabulary import TEMPLATE, tokenizer


class ReadingSlowly(FrontEnd):
    """Something happens after the engine is ready and before the text has been read."""

    meanwhile: Callable[["ReadingSlowly"], Awaitable[None]]

    async def _read_text(self, described: Described) -> tuple[Tokenizer, ChatTemplates]:
        text = await super()._read_text(described)
        while self._lines[0].ready is None:
            await asyncio.sleep(0.01)
        await self.meanwhile(self)
        return text


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(tokenizer()._backend.to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def test_an_engine_that_ends_when_it_was_ready_is_not_taken_for_one_that_is_there(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    address = str(tmp_path / "engine")
    engines: list[tuple[EngineProcess, asyncio.Task[int]]] = []

    def start() -> None:
        process = EngineProcess(address, FakeEngine(tmp_path))
        engines.append((process, asyncio.create_task(process.run())))

    async def stop() -> None:
        process, running = engines[-1]
        process.stop()
        await asyncio.wait_for(running, WAIT_S)
        for front_end in list(process._front_ends):
            front_end._transport.abort()
        Path(address).unlink(missing_ok=True)

    async def replace_engine(front_end: ReadingSlowly) -> None:
        await stop()
        async with asyncio.timeout(WAIT_S):
            while front_end._lines[0].client is not None:
                await asyncio.sleep(0.01)
        start()

    async def run() -> None:
        start()
        front_end = ReadingSlowly(ServerSettings(), 1)
        front_end.meanwhile = replace_engine
        service = await asyncio.wait_for(front_end.join([address]), WAIT_S)
        assert len(engines) == 2
        assert service.why_not_ready is None, "it would refuse what it should let wait"
        await stop()

    asyncio.run(run())


class WithAdapters(FakeEngine):
    """Its settings give an adapter a name that the model has."""

    def __call__(self, describe: Callable[[Described | Waiting], None]) -> Engine:
        def with_adapters(described: Described | Waiting) -> None:
            assert isinstance(described, Described)
            describe(msgspec.structs.replace(described, adapters=("style", "fake")))

        return super().__call__(with_adapters)


def test_an_adapter_with_the_name_of_the_model_is_refused(tmp_path: Path) -> None:
    """Requests that name it would get the model itself."""
    write_tokenizer(tmp_path)
    address = str(tmp_path / "engine")

    async def run() -> None:
        process = EngineProcess(address, WithAdapters(tmp_path))
        running = asyncio.create_task(process.run())
        with pytest.raises(InvalidSetting, match="lora_adapters has 'fake', which is a name of the model itself"):
            await asyncio.wait_for(FrontEnd(ServerSettings(), 1).join([address]), WAIT_S)
        process.stop()
        await asyncio.wait_for(running, WAIT_S)

    asyncio.run(run())


def test_a_front_end_serves_without_an_engine_that_was_given_up_before_it_started(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    address = str(tmp_path / "engine")

    async def run() -> None:
        process = EngineProcess(address, FakeEngine(tmp_path))
        running = asyncio.create_task(process.run())
        front_end = FrontEnd(ServerSettings(data_parallel=2), 1)
        front_end.give_up(GaveUp("it ends again and again", engine=1))
        service = await asyncio.wait_for(front_end.join([address, str(tmp_path / "nothing")]), WAIT_S)
        assert service.why_not_ready is None
        assert [engine.is_gone for engine in service.engines] == [False, True]
        assert service.engines[1].why_not == "it ends again and again"
        await front_end.close(service)
        process.stop()
        await asyncio.wait_for(running, WAIT_S)

    asyncio.run(run())


def test_clients_see_no_folder_of_the_machine_in_the_reason_of_an_engine_that_is_given_up(tmp_path: Path) -> None:
    """Before there is a service, when it begins, and when an engine is lost later."""
    write_tokenizer(tmp_path)
    addresses = [str(tmp_path / name) for name in ("one", "nothing")]
    later = GaveUp(f"{tmp_path}/model.safetensors: it is cut off, 16 times in a row; it is not started again", engine=0)

    async def run() -> None:
        process = EngineProcess(addresses[0], FakeEngine(tmp_path))
        running = asyncio.create_task(process.run())
        front_end = FrontEnd(ServerSettings(data_parallel=2), 1)
        front_end.give_up(GaveUp(f"{tmp_path}/config.json: it is missing", engine=1))
        assert front_end._loading.reason == "config.json: it is missing"
        service = await asyncio.wait_for(front_end.join(addresses), WAIT_S)
        assert service.engines[1].why_not == "config.json: it is missing"
        front_end.give_up(later)
        told = "model.safetensors: it is cut off, 16 times in a row; it is not started again"
        assert service.engines[0].why_not == told
        assert told in (service.why_not_ready or "")
        assert str(tmp_path) not in (service.why_not_ready or "")
        await front_end.close(service)
        process.stop()
        await asyncio.wait_for(running, WAIT_S)

    asyncio.run(run())


def test_an_engine_on_another_platform_is_not_used(tmp_path: Path) -> None:
    """Its numbers, and so its tokens, could be others."""
    write_tokenizer(tmp_path)
    addresses = [str(tmp_path / name) for name in ("one", "other")]

    class Elsewhere(FakeEngine):
        def __call__(self, describe: Callable[[Described], None]) -> Engine:
            engine = super().__call__(describe)
            engine.executor.platform = "gpu"
            return engine

    async def run() -> None:
        processes = [
            EngineProcess(addresses[0], FakeEngine(tmp_path)),
            EngineProcess(addresses[1], Elsewhere(tmp_path)),
        ]
        running = [asyncio.create_task(processes[0].run())]
        front_end = FrontEnd(ServerSettings(data_parallel=2), 1)
        service = await asyncio.wait_for(front_end.join(addresses), WAIT_S)
        running.append(asyncio.create_task(processes[1].run()))
        async with asyncio.timeout(WAIT_S):
            while front_end._lines[1].ready is None or "it runs on" not in (service.engines[1].why_not or ""):
                await asyncio.sleep(0.01)
        assert service.engines[1].why_not == "it runs on a gpu, and others on a cpu; it is not used"
        assert (service.engines[0].port is not None, service.engines[1].port) == (True, None)
        await front_end.close(service)
        for process in processes:
            process.stop()
        await asyncio.wait_for(asyncio.gather(*running), WAIT_S)

    asyncio.run(run())


class Admits:
    """A front end that sends requests to an engine as soon as it is ready."""

    def __init__(self) -> None:
        self.heard: list[ToFrontEnd] = []

    def on_described(self, described: Described) -> None: ...

    def on_ready(self, line: EngineLine) -> None:
        assert line.client is not None
        line.client.on_messages = self.heard.extend

    def on_waiting(self, line: EngineLine, reason: str) -> None: ...

    def on_lost(self, line: EngineLine, reason: str) -> None: ...


def test_what_comes_together_with_the_news_that_an_engine_is_ready_is_not_lost() -> None:
    """The table of its adapters follows at once."""
    admits = Admits()
    line = EngineLine(0, "address", 1, admits)
    line.client = EngineClient(1, line._on_greetings, line._on_lost)
    table = AdapterTable(3, {"style": "folder"})
    line.client.data_received(frame([Ready(100, "cpu")]) + frame([table]))
    assert admits.heard == [table]
