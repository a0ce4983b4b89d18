"""An idle engine checks now and then that its device still computes."""

import threading
import time
from collections.abc import Callable

from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.engine.idle_upkeep import IdleUpkeep
from quire.errors import EngineFailed
from quire.request import Request
from tests.core.harness import limits
from tests.engine.test_driver import Client
from tests.engine.test_engine import DeviceError
from tests.fake_executor import FakeExecutor, expected_tokens
from tests.patience import WAIT_S


def new_engine(
    before_check: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> tuple[Engine, FakeExecutor]:
    chosen = limits(num_pages=200, max_batch_size=8)
    executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, before_check=before_check)
    return Engine(Scheduler(chosen, clock), executor, clock=clock), executor


class Failing:
    """Fails the first `times` checks of a device."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.passed = threading.Event()

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            raise DeviceError("the device is gone")
        self.passed.set()


def test_an_idle_driver_checks_its_device_again_and_again():
    checked = threading.Semaphore(0)
    engine, _ = new_engine(checked.release)
    driver = Driver(engine, check_every_s=0.01)
    driver.start()
    assert all(checked.acquire(timeout=WAIT_S) for _ in range(3))
    assert engine.num_faults == 0
    assert driver.stop(join_s=WAIT_S)


def test_a_device_that_fails_a_check_is_set_up_again_and_serves():
    failing = Failing(times=1)
    engine, executor = new_engine(failing)
    driver = Driver(engine, check_every_s=0.01)
    driver.start()
    client = Client(driver)
    first = client.submit(1, prompt=(1, 2, 3, 4, 5, 6))
    client.wait_for(first)
    assert failing.passed.wait(WAIT_S)
    assert (executor.num_resets, engine.num_faults, engine.error) == (1, 1, None)
    again = client.submit(2, prompt=(1, 2, 3, 4, 5, 6))  # whose pages are gone with the state of the device
    client.wait_for(again)
    assert client.tokens[again.request_id] == expected_tokens(again)
    assert driver.stop(join_s=WAIT_S)


def test_an_engine_whose_device_stays_dead_gives_up(caplog):
    abandoned: list[tuple[str, bool]] = []
    told = threading.Event()

    def abandon(reason: str, no_request_at_fault: bool) -> None:
        abandoned.append((reason, no_request_at_fault))
        told.set()

    engine, _ = new_engine(Failing(times=1_000_000))
    driver = Driver(engine, abandon=abandon, check_every_s=0.01)
    driver.start()
    assert told.wait(WAIT_S)
    assert driver.stop(join_s=WAIT_S)
    reason, no_request_at_fault = abandoned[0]
    assert "the device does not compute" in reason
    assert "the device is gone" in caplog.text
    assert no_request_at_fault
    assert isinstance(engine.error, EngineFailed)


def test_an_engine_in_no_process_of_its_own_refuses_what_comes_after_its_device_died():
    engine, _ = new_engine(Failing(times=1_000_000))
    engine.check_device()
    driver = Driver(engine, check_every_s=0.01)
    driver.start()
    client = Client(driver)
    asked = client.submit(1)
    client.wait_for(asked)
    assert client.ended[asked.request_id].kind == EngineFailed.kind
    assert driver.stop(join_s=WAIT_S)


def test_what_wakes_an_idle_engine_without_a_step_does_not_put_off_the_check():
    now, checks = 100.0, []
    engine, _ = new_engine(lambda: checks.append(now), lambda: now)
    upkeep = IdleUpkeep(engine, audit_after_s=5.0, check_every_s=30.0)

    def wake_up(at_s: float) -> None:
        """As by a request that is refused."""
        nonlocal now
        now = at_s
        upkeep.begin()
        upkeep.run()

    wake_up(100.0)
    wake_up(120.0)
    wake_up(140.0)
    assert checks == [140.0]
    engine.add(Request(1, (1, 2, 3), 1))
    engine.step()
    wake_up(160.0)
    wake_up(180.0)
    assert checks == [140.0]  # the step showed that it computes
    now = 190.0
    upkeep.run()
    assert checks == [140.0, 190.0]


def test_an_engine_tells_how_long_its_device_has_not_answered():
    now, seen = 100.0, []

    def take_time() -> None:
        nonlocal now
        seen.append(engine.checking_s)
        now += 7.0
        seen.append(engine.checking_s)

    class SlowToReset(FakeExecutor):
        def reset(self) -> None:
            take_time()
            super().reset()

    scheduler = Scheduler(limits(), lambda: now)
    engine = Engine(scheduler, SlowToReset(10, 4, 2, before_check=take_time), clock=lambda: now)
    assert engine.checking_s is None
    for ask_device in (engine.check_device, engine.start_over):
        ask_device()
        assert seen == [0.0, 7.0]
        seen.clear()
        assert engine.checking_s is None


def test_the_work_of_an_idle_engine_goes_on_until_it_ends():
    now, done = 100.0, []
    engine, _ = new_engine(lambda: None, lambda: now)
    engine.idle_work = lambda: done.append(now) or (0.5 if len(done) < 3 else None)
    upkeep = IdleUpkeep(engine, audit_after_s=5.0, check_every_s=30.0)
    upkeep.begin()
    assert upkeep.run() == 0.5
    assert upkeep.run() == 0.5
    assert upkeep.run() == 5.0  # the next audit
    upkeep.run()
    assert done == [100.0] * 3


def test_work_in_which_the_device_fails_ends_and_the_engine_serves_on():
    engine, _ = new_engine(lambda: None)

    def fail() -> float:
        raise RuntimeError("no memory")

    engine.idle_work = fail
    upkeep = IdleUpkeep(engine, audit_after_s=5.0, check_every_s=30.0)
    upkeep.begin()
    upkeep.run()
    assert engine.idle_work is None
    assert engine.error is None
    assert engine.num_faults == 1
    engine.add(Request(1, (1, 2, 3), 1))
    assert engine.step().updates
