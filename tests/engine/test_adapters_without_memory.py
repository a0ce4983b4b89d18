"""An adapter that there is no memory for costs the request that it is read for, and no other."""

import time
from typing import Any

import pytest

from quire.core.adapter_slots import AdapterSlots
from quire.core.scheduler import Scheduler
from quire.engine.adapters import LoadedAdapters
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.errors import RequestFailed
from quire.ipc.messages import Submit
from tests.core.harness import limits, request
from tests.core.operations import operations
from tests.engine.test_driver import Client
from tests.fake_executor import FakeExecutor, expected_tokens
from tests.patience import WAIT_S


class FullExecutor(FakeExecutor):
    """The host has no memory for adapters."""

    def add_adapter(self, number, adapter):
        raise MemoryError("no room for an adapter")


def test_an_adapter_that_does_not_fit_fails_the_request_that_another_engine_began():
    chosen = limits(num_pages=200, max_batch_size=8, max_loras=2)
    executor = FullExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size)
    driver = Driver(Engine(Scheduler(chosen, time.monotonic), executor, read_adapter=lambda folder: [folder]))
    driver.start()
    client = Client(driver)
    begun = request(client.port.request_id(1), adapter="a", adapter_digest=executor.adapter_digest(["/a"]))
    client.port.send(Submit(begun, adapter_folder="/a"))
    other = client.submit(2)
    client.wait_for(begun, other)
    assert client.ended[begun.request_id].kind == RequestFailed.kind
    assert client.tokens[other.request_id] == expected_tokens(other)
    assert driver.stop(join_s=WAIT_S)


def test_a_name_stands_for_what_it_stood_for_when_there_is_no_memory_for_another():
    slots, executors = AdapterSlots(2), [FakeExecutor(8, 4, 4), FullExecutor(8, 4, 4)]
    adapters = LoadedAdapters(slots, lambda: executors[0], lambda folder: [folder])
    adapters.load("a", "/first")
    number, table = slots.find("a"), dict(adapters.folders)
    executors.reverse()
    with pytest.raises(MemoryError):
        adapters.load("a", "/second")
    with pytest.raises(MemoryError):
        adapters.load("b", "/second")
    assert (slots.names, slots.find("a"), adapters.folders) == (["a"], number, table)


class Dropped(FakeExecutor):
    """Remembers the adapters that are dropped."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.dropped: list[int] = []

    def drop_adapter(self, number):
        super().drop_adapter(number)
        self.dropped.append(number)


def test_the_end_of_a_request_costs_the_same_with_many_adapters_and_each_is_dropped_once():
    costs = []
    for count in (3, 300):
        slots, executor = AdapterSlots(2), Dropped(8, 4, 4)
        adapters = LoadedAdapters(slots, lambda executor=executor: executor, lambda folder: [folder])
        for number in range(count):
            adapters.load(f"adapter {number}", "/folder")
        slots.hold(1)
        adapters.unload("adapter 0")
        assert executor.dropped == []
        slots.release(1)
        costs.append(operations(adapters.drop_unused))
        adapters.drop_unused()
        assert executor.dropped == [1]
    assert costs[0] == costs[1]
