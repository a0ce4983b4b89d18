"""The engine thread: every request that is submitted hears of its end."""

import queue
import threading
import time
from collections.abc import Callable

import pytest

from quire.core.scheduler import Scheduler
from quire.engine.driver import MAX_COMMANDS_PER_TURN, Driver, Phase
from quire.engine.engine import Engine
from quire.engine.port import Port
from quire.errors import Overloaded
from quire.ipc.messages import Abort, AdapterTable, BegunWith, Event, Failed, Progress, Queued, Started, Submit
from quire.request import FinishReason, Request
from tests.core.harness import limits, request
from tests.engine.test_engine import poisoned
from tests.fake_executor import POISON, FakeExecutor, expected_tokens
from tests.patience import WAIT_S


def wait_until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s, "it did not come true in time"
        time.sleep(0.005)


class Client:
    """A front end that remembers what it is told."""

    def __init__(self, driver: Driver) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.port: Port = driver.open(lambda events: [self.events.put(event) for event in events])
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Failed | FinishReason] = {}

    def submit(self, count: int, **fields) -> Request:
        asked = request(self.port.request_id(count), **fields)
        self.port.send(Submit(asked))
        return asked

    def wait_for(self, *requests: Request) -> None:
        while any(asked.request_id not in self.ended for asked in requests):
            self.take(self.events.get(timeout=WAIT_S))

    def take(self, event: Event) -> None:
        if isinstance(event, Failed):
            assert event.request_id not in self.ended
            self.ended[event.request_id] = event
            return
        if isinstance(event, Queued | Started | AdapterTable | BegunWith):
            return
        for update in event.updates:
            self.tokens.setdefault(update.request_id, []).extend(update.tokens)
            if update.finish is not None:
                self.ended[update.request_id] = update.finish


def new_driver(before_submit=None, before_result=None, **changes) -> Driver:
    chosen = limits(**({"num_pages": 200, "max_batch_size": 8} | changes))
    executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, before_submit, before_result)
    return Driver(Engine(Scheduler(chosen, time.monotonic), executor))


@pytest.fixture
def make_driver():
    drivers: list[Driver] = []

    def make(*faults, **changes) -> Driver:
        driver = new_driver(*faults, **changes)
        drivers.append(driver)
        driver.start()
        return driver

    yield make
    for driver in drivers:
        driver.stop(join_s=WAIT_S)


def test_two_front_ends_get_each_their_own_answers(make_driver):
    driver = make_driver()
    first, second = Client(driver), Client(driver)
    asked = [
        (client, client.submit(n, prompt=(n, 1, 2), max_tokens=10)) for n in range(5) for client in (first, second)
    ]
    for client, one in asked:
        client.wait_for(one)
        assert client.tokens[one.request_id] == expected_tokens(one)
    assert len(first.ended) == len(second.ended) == 5


def test_a_refusal_is_an_event_with_its_kind_and_retry_time(make_driver):
    release = threading.Event()
    driver = make_driver(before_result=lambda *_: release.wait(WAIT_S), max_batch_size=1, max_queued=1)
    client = Client(driver)
    requests = [client.submit(n, max_tokens=2) for n in range(6)]
    release.set()
    client.wait_for(*requests)
    refusals = [end for end in client.ended.values() if isinstance(end, Failed)]
    assert refusals
    assert {refusal.kind for refusal in refusals} == {Overloaded.kind}
    assert all(refusal.retry_after_s for refusal in refusals)


def test_an_id_of_another_port_is_refused(make_driver):
    driver = make_driver()
    first, second = Client(driver), Client(driver)
    stolen = request(second.port.request_id(1))
    first.port.send(Submit(stolen))
    first.wait_for(stolen)
    assert "does not belong to port 1" in first.ended[stolen.request_id].message


def test_an_aborted_request_is_heard_of_no_more_and_frees_its_pages(make_driver):
    started, may_go_on = threading.Event(), threading.Event()
    driver = make_driver(before_result=lambda *_: (started.set(), may_go_on.wait(WAIT_S)))
    client = Client(driver)
    endless = client.submit(1, max_tokens=50)
    assert started.wait(WAIT_S)
    client.port.send(Abort(endless.request_id))
    other = client.submit(2, max_tokens=3)
    may_go_on.set()
    client.wait_for(other)
    assert endless.request_id not in client.ended
    assert driver.stop(drain_s=WAIT_S)
    scheduler = driver.engine.scheduler
    assert scheduler.stats().free_pages + scheduler.stats().cached_pages == 199


def test_closing_a_port_aborts_its_requests_and_no_others(make_driver):
    driver = make_driver()
    leaving, staying = Client(driver), Client(driver)
    for n in range(3):
        leaving.submit(n, prompt=(n, 1), max_tokens=60)
    stays = staying.submit(1, max_tokens=8)
    leaving.port.close()
    staying.wait_for(stays)
    assert staying.tokens[stays.request_id] == expected_tokens(stays)
    assert driver.stop(drain_s=WAIT_S)
    assert driver.engine.scheduler.num_requests == 0


def test_a_front_end_that_cannot_be_delivered_to_is_closed_and_others_go_on(make_driver):
    driver = make_driver()
    tries: list[list[Event]] = []

    def broken(events: list[Event]) -> None:
        tries.append(events)
        raise OSError("the pipe is broken")

    port = driver.open(broken)
    port.send(Submit(request(port.request_id(1), max_tokens=60)))
    client = Client(driver)
    asked = client.submit(1, max_tokens=8)
    client.wait_for(asked)
    assert client.tokens[asked.request_id] == expected_tokens(asked)
    assert driver.stop(drain_s=WAIT_S)
    told = [type(event) for events in tries for event in events]
    assert told == [Started, Progress], "it was not closed after the first turn"


def test_a_poisoned_request_fails_alone_through_the_driver(make_driver):
    driver = make_driver(before_result=poisoned())
    client = Client(driver)
    requests = [client.submit(n, prompt=(n, POISON if n == 3 else 1), max_tokens=6) for n in range(8)]
    client.wait_for(*requests)
    failed = {n for n, one in enumerate(requests) if isinstance(client.ended[one.request_id], Failed)}
    assert failed == {3}
    assert client.ended[requests[3].request_id].kind == "generation"


def test_an_unexpected_error_reaches_every_request_and_those_to_come(make_driver):
    """A defect in the scheduler itself, here an executor that answers with a step that was never planned."""

    class WrongStep(FakeExecutor):
        def _run(self, plan):
            return super()._run(plan)._replace(step=-1)

    chosen = limits()
    executor = WrongStep(chosen.num_pages, chosen.page_size, chosen.max_batch_size)
    driver = Driver(Engine(Scheduler(chosen, time.monotonic), executor))
    client = Client(driver)
    early = [client.submit(n) for n in range(3)]
    driver.start()
    client.wait_for(*early)
    late = client.submit(9)
    client.wait_for(late)
    assert {end.kind for end in client.ended.values()} == {"engine_failed"}
    assert driver.stop(join_s=WAIT_S)


def test_draining_finishes_what_runs_and_refuses_what_comes(make_driver):
    started, may_go_on = threading.Event(), threading.Event()
    driver = make_driver(before_result=lambda *_: (started.set(), may_go_on.wait()))
    client = Client(driver)
    running = client.submit(1, max_tokens=20)
    assert started.wait(WAIT_S)
    stopper = threading.Thread(target=driver.stop, args=(WAIT_S,))
    stopper.start()
    wait_until(lambda: driver.phase is Phase.DRAINING)
    late = client.submit(2)
    may_go_on.set()
    client.wait_for(running, late)
    stopper.join(WAIT_S)
    assert client.ended[running.request_id] is FinishReason.LENGTH
    assert client.ended[late.request_id].kind == "engine_stopped"
    assert not driver._thread.is_alive()
    after = client.submit(3)
    client.wait_for(after)
    assert client.ended[after.request_id].kind == "engine_stopped"


def test_stopping_without_time_fails_what_runs(make_driver):
    started, may_go_on = threading.Event(), threading.Event()
    driver = make_driver(before_result=lambda *_: (started.set(), may_go_on.wait(WAIT_S)))
    client = Client(driver)
    running = client.submit(1, max_tokens=50)
    assert started.wait(WAIT_S)
    stopper = threading.Thread(target=driver.stop, args=(0.0, WAIT_S))
    stopper.start()
    wait_until(lambda: driver.phase is Phase.DRAINING)
    may_go_on.set()
    client.wait_for(running)
    stopper.join(WAIT_S)
    assert not driver._thread.is_alive()
    assert client.ended[running.request_id].kind == "engine_stopped"


def test_stopping_is_bounded_when_a_step_never_returns(make_driver):
    started, release = threading.Event(), threading.Event()
    driver = make_driver(before_result=lambda *_: (started.set(), release.wait()))
    Client(driver).submit(1)
    assert started.wait(WAIT_S)
    assert not driver.stop(join_s=0.2)  # it returns
    release.set()


def test_stopping_what_never_started_answers_what_was_sent():
    driver = new_driver()
    client = Client(driver)
    early = client.submit(1)
    assert driver.stop(join_s=WAIT_S)
    client.wait_for(early)
    late = client.submit(2)
    client.wait_for(late)
    assert {end.kind for end in client.ended.values()} == {"engine_stopped"}
    assert driver.stop(join_s=WAIT_S)
    with pytest.raises(RuntimeError, match="it is stopped"):
        driver.start()


def test_stopping_again_with_less_time_waits_less(make_driver):
    started, may_go_on = threading.Event(), threading.Event()
    driver = make_driver(before_result=lambda *_: (started.set(), may_go_on.wait()))
    client = Client(driver)
    running = client.submit(1, max_tokens=60)
    assert started.wait(WAIT_S)
    patient = threading.Thread(target=driver.stop, args=(3600.0,))
    patient.start()
    wait_until(lambda: driver.phase is Phase.DRAINING)
    hasty = threading.Thread(target=driver.stop, args=(0.0, WAIT_S))
    hasty.start()
    wait_until(lambda: driver._drain_until_s <= time.monotonic())
    may_go_on.set()
    client.wait_for(running)
    assert client.ended[running.request_id].kind == "engine_stopped"
    for stopper in (hasty, patient):
        stopper.join(WAIT_S)
        assert not stopper.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_is_made_to_exit_answers_its_requests(make_driver):
    def leave(*_: object) -> None:
        raise SystemExit

    driver = make_driver(before_result=leave)
    client = Client(driver)
    running = client.submit(1)
    client.wait_for(running)
    assert client.ended[running.request_id].kind == "engine_stopped"
    late = client.submit(2)
    client.wait_for(late)


def test_an_error_over_one_command_costs_its_request_alone():
    """A request of a kind that nothing lets through, and those sent with it."""
    driver = new_driver()
    client = Client(driver)
    wrong = request(client.port.request_id(1))
    object.__setattr__(wrong, "max_tokens", None)
    client.port.send(Submit(wrong))
    others = [client.submit(n) for n in (2, 3)]
    driver.start()
    client.wait_for(wrong, *others)
    assert client.ended.pop(wrong.request_id).kind == "generation"
    assert set(client.ended.values()) == {FinishReason.LENGTH}
    assert driver.stop(join_s=WAIT_S)


def test_a_flood_of_requests_is_taken_in_over_several_steps():
    driver = new_driver()
    client = Client(driver)
    flood = [client.submit(n, max_tokens=1) for n in range(2 * MAX_COMMANDS_PER_TURN - 1)]  # after its opening
    driver.turn()
    assert len(driver._inbox) == MAX_COMMANDS_PER_TURN
    driver.start()
    client.wait_for(*flood)
    assert driver.stop(join_s=WAIT_S)


def test_what_a_closed_port_asks_for_is_not_run():
    driver = new_driver()
    gone, client = Client(driver), Client(driver)
    gone.port.close()
    gone.submit(1, max_tokens=60)
    asked = client.submit(1, max_tokens=3)
    driver.start()
    client.wait_for(asked)
    assert driver.engine.scheduler.num_requests == 0
    assert gone.events.empty()
    assert driver.stop(join_s=WAIT_S)


def test_an_id_in_use_is_refused_and_the_first_goes_on():
    driver = new_driver()
    client = Client(driver)
    first = client.submit(1, max_tokens=5)
    client.submit(1, max_tokens=9)
    driver.start()
    refusal = client.events.get(timeout=WAIT_S)
    assert isinstance(refusal, Failed)
    assert "in use" in refusal.message
    client.wait_for(first)
    assert client.tokens[first.request_id] == expected_tokens(first)
    assert driver.stop(join_s=WAIT_S)


def test_an_idle_engine_uses_no_processor_time(make_driver):
    driver = make_driver()
    client = Client(driver)
    client.wait_for(client.submit(1))
    time.sleep(0.1)
    clock = time.pthread_getcpuclockid(driver._thread.ident)  # that of its own thread: this process has others
    before = time.clock_gettime(clock)
    time.sleep(0.5)
    assert time.clock_gettime(clock) - before < 0.05
