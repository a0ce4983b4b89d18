"""An adapter that there is no memory for costs the request that it is read for, and no other."""

import time

from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.errors import RequestFailed
from quire.ipc.messages import Submit
from tests.core.harness import limits, request
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
