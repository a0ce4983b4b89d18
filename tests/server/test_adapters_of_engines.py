"""Several engines have the same adapters, whatever happens while one of them loads."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from quire.errors import EngineFailed, InvalidAdapter, InvalidRequest
from quire.ipc.messages import AdapterDone, AdapterTable, LoadAdapter, SyncAdapters, UnloadAdapter
from quire.server.service.service import Service
from tests.patience import WAIT_S
from tests.server.engine_ports import Port, Worker
from tests.server.vocabulary import served_model


class WithAdapters(Worker):
    """A worker of a model without adapters, which does not share its table of them with other tests."""

    def __init__(self) -> None:
        super().__init__()
        self.service = Service(served_model(max_total_tokens=2000), self.service.settings)
        for number in range(2):
            self.connect(number)

    async def begin(self, change: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Until the engines have been asked."""
        task = asyncio.create_task(change)
        await asyncio.sleep(0)
        return task

    async def load(self, *, replaces: bool = False) -> "asyncio.Task[None]":
        return await self.begin(self.service.adapters.load("c", "c", self.service.engines, replaces=replaces))

    def answer(self, engine: int, kind: type, error: str | None = None, table: AdapterTable | None = None) -> None:
        """Answer the last command of this kind."""
        done = AdapterDone(self.ports[engine].of(kind)[-1].number, error, error or "")
        self.service.on_messages([*([] if table is None else [table]), done], engine=engine)


def synced(port: Port) -> SyncAdapters:
    found: SyncAdapters = port.of(SyncAdapters)[-1]
    return found


def test_an_engine_that_connects_while_another_loads_an_adapter_is_told_of_it() -> None:
    async def run() -> None:
        worker = WithAdapters()
        worker.engine_lost(1)
        loading = await worker.load()
        worker.connect(1)
        worker.answer(0, LoadAdapter, table=AdapterTable(1, {"c": "/c"}))
        await loading
        assert synced(worker.ports[1]) == SyncAdapters(1, {"c": "/c"}), "requests for it would be refused there"

    asyncio.run(run())


def test_an_engine_that_ends_does_not_answer_for_another() -> None:
    """What is told to the client must be what there is in the end: an adapter on all engines, or on none."""

    async def run() -> None:
        worker = WithAdapters()
        loading = await worker.load()
        worker.engine_lost(0)
        await asyncio.sleep(0)
        assert not loading.done(), "the other one loads still"
        worker.answer(1, LoadAdapter, table=AdapterTable(1, {"c": "/c"}))
        async with asyncio.timeout(WAIT_S):
            while not worker.ports[1].of(UnloadAdapter):
                await asyncio.sleep(0)
        worker.answer(1, UnloadAdapter, table=AdapterTable(2, {}))
        with pytest.raises(EngineFailed, match="has ended"):
            await loading
        assert not worker.service.model.adapters

    asyncio.run(run())


def test_an_adapter_that_one_engine_cannot_read_again_is_unloaded() -> None:
    """Its folder is the same, so nothing else tells the engines that one of them has what was there before."""

    async def run() -> None:
        worker = WithAdapters()
        loading = await worker.load()
        for engine in range(2):
            worker.answer(engine, LoadAdapter, table=AdapterTable(1, {"c": "/c"}))
        await loading
        again = await worker.load(replaces=True)
        worker.answer(0, LoadAdapter, table=AdapterTable(2, {"c": "/c"}))
        worker.answer(1, LoadAdapter, error="invalid_adapter")
        async with asyncio.timeout(WAIT_S):
            while not worker.ports[0].of(UnloadAdapter):
                await asyncio.sleep(0)
        assert not worker.ports[1].of(UnloadAdapter), "it follows the table"
        worker.answer(0, UnloadAdapter, table=AdapterTable(3, {}))
        with pytest.raises(InvalidAdapter):
            await again
        assert not worker.service.model.adapters
        assert synced(worker.ports[1]) == SyncAdapters(3, {})

    asyncio.run(run())


def test_an_adapter_that_is_read_again_outlives_an_engine() -> None:
    """The next one reads what is in the folder now, as the others have."""

    async def run() -> None:
        worker = WithAdapters()
        loading = await worker.load()
        for engine in range(2):
            worker.answer(engine, LoadAdapter, table=AdapterTable(1, {"c": "/c"}))
        await loading
        again = await worker.load(replaces=True)
        worker.engine_lost(0)
        worker.answer(1, LoadAdapter, table=AdapterTable(2, {"c": "/c"}))
        with pytest.raises(EngineFailed):
            await again
        assert not worker.ports[1].of(UnloadAdapter)
        assert worker.service.model.adapters == {"c": "/c"}

    asyncio.run(run())


def test_an_adapter_that_no_engine_can_read_again_stays() -> None:
    async def run() -> None:
        worker = WithAdapters()
        loading = await worker.load()
        for engine in range(2):
            worker.answer(engine, LoadAdapter, table=AdapterTable(1, {"c": "/c"}))
        await loading
        again = await worker.load(replaces=True)
        for engine in range(2):
            worker.answer(engine, LoadAdapter, error="invalid_adapter")
        with pytest.raises(InvalidAdapter):
            await again
        assert not any(port.of(UnloadAdapter) for port in worker.ports)
        assert worker.service.model.adapters == {"c": "/c"}

    asyncio.run(run())


def test_loading_ends_when_the_engine_is_given_up_before_its_end_is_known() -> None:
    async def run() -> None:
        worker = WithAdapters()
        worker.engine_lost(1)
        loading = await worker.load()
        worker.service.disconnect("it ended 5 times in a row", 0)
        with pytest.raises(EngineFailed, match="5 times"):
            await asyncio.wait_for(loading, WAIT_S)

    asyncio.run(run())


def test_a_name_that_is_being_loaded_is_not_loaded_by_another_request() -> None:
    """Both would be told that it is theirs, and if one failed on an engine it would unload the other's."""

    async def run() -> None:
        worker = WithAdapters()
        loading = await worker.load()
        with pytest.raises(InvalidRequest, match="'c', which is being loaded"):
            await (await worker.load())
        assert len(worker.ports[0].of(LoadAdapter)) == 1
        worker.answer(0, LoadAdapter, error="invalid_adapter")
        worker.answer(1, LoadAdapter, error="invalid_adapter")
        with pytest.raises(InvalidAdapter):
            await loading
        again = await worker.load()
        for engine in range(2):
            worker.answer(engine, LoadAdapter, table=AdapterTable(1, {"c": "/c"}))
        await again

    asyncio.run(run())
