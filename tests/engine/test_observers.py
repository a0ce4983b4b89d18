"""Observers of steps, which cannot end the engine, and judges, which can."""

import logging
import time

import pytest

from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.engine.observer import Judge, Observer, Step
from quire.errors import EngineFailed
from quire.ipc.messages import Failed, Progress, Queued, Submit
from quire.request import FinishReason
from tests.core.harness import limits, request
from tests.engine.test_driver import Client, wait_until
from tests.engine.test_engine import poisoned
from tests.fake_executor import POISON, FakeExecutor, expected_tokens
from tests.patience import WAIT_S

METHODS = [name for name in vars(Observer) if not name.startswith("_")]


class Broken(Observer):
    """Raises in these methods, and hears of all."""

    def __init__(self, *methods: str) -> None:
        self._methods = methods
        self.heard: list[str] = []

    def _hear(self, method: str) -> None:
        self.heard.append(method)
        if method in self._methods:
            raise KeyError(method)

    def step_launched(self, step: Step) -> None:
        self._hear("step_launched")

    def step_ended(self, step: Step) -> None:
        self._hear("step_ended")

    def steps_discarded(self, steps: object) -> None:
        self._hear("steps_discarded")

    def step_delivered(self, step: Step) -> None:
        self._hear("step_delivered")

    def detached(self) -> None:
        self._hear("detached")


def engine_with(*observers: Observer) -> Engine:
    chosen = limits(num_pages=200)
    executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, poisoned(0), None)
    engine = Engine(Scheduler(chosen, time.monotonic), executor)
    for observer in observers:
        engine.observe(observer)
    return engine


@pytest.mark.parametrize("method", METHODS)
def test_an_observer_that_raises_is_named_once_and_heard_of_no_more(method: str, caplog: pytest.LogCaptureFixture):
    methods = {"step_ended", "detached"} if method == "detached" else {method}  # only one that has raised is detached
    broken, sound = Broken(*methods), Broken()
    driver = Driver(engine_with(broken, sound))
    client = Client(driver)
    driver.start()
    asked = [client.submit(n, prompt=(n, POISON) if n == 2 else (n, 1), max_tokens=6) for n in range(4)]
    client.wait_for(*asked)
    assert driver.stop(join_s=WAIT_S)
    assert isinstance(client.ended[asked[2].request_id], Failed), "a step fails, and others behind it are discarded"
    for one in (asked[0], asked[1], asked[3]):
        assert client.ended[one.request_id] is FinishReason.LENGTH
        assert client.tokens[one.request_id] == expected_tokens(one)
    told = [one for one in caplog.records if "Broken" in one.message]
    assert [one.levelno for one in told] == [logging.ERROR] * len(methods)
    assert all(one.exc_info is not None for one in told), "with where it was"
    assert broken.heard[-1] == "detached"
    assert broken.heard.count(method) == 1
    assert set(sound.heard) == set(METHODS) - {"detached"}, "others hear of all"


def test_an_engine_goes_on_without_observers():
    """Requests are accepted all the same."""
    engine = engine_with()
    driver = Driver(engine)
    for observer in engine.observers:
        engine.observers.detach(observer)
    events: list[object] = []
    port = driver.open(events.extend)
    driver.start()
    asked = request(port.request_id(1), max_tokens=6, timings=True, traced=True)
    port.send(Submit(asked))

    def updates():
        return [update for event in events if isinstance(event, Progress) for update in event.updates]

    wait_until(lambda: any(update.finish for update in updates()))
    assert driver.stop(join_s=WAIT_S)
    assert events[0] == Queued(asked.request_id), "before its first token"
    assert [token for update in updates() for token in update.tokens] == expected_tokens(asked)


def test_the_time_of_the_last_step_is_known_without_a_meter():
    engine = engine_with()
    before = engine.last_end_s
    engine.add(request(1, max_tokens=2))
    while not engine.is_idle:
        engine.step()
    assert engine.last_end_s > before


class Strict(Judge):
    def step_ended(self, step: Step) -> None:
        raise EngineFailed("it may not go on")


def test_a_judge_ends_the_engine_after_observers_have_heard_of_the_step():
    sound = Broken()
    engine = engine_with(sound)
    engine.judge(Strict())
    engine.add(request(1, max_tokens=2))
    with pytest.raises(EngineFailed, match="it may not go on"):
        engine.step()
    assert "step_ended" in sound.heard


def test_a_judge_is_no_observer_and_no_observer_is_a_judge():
    assert not issubclass(Judge, Observer)
    assert not issubclass(Observer, Judge)
