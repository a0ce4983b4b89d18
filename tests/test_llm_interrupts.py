"""Interrupts end what is running, wherever they strike, and the next answers are right."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.plan import StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.errors import QuireError, RequestFailed
from quire.llm.completion import Completion, CompletionBuilder, Delta
from quire.llm.engine_stepper import EngineStepper
from quire.llm.run import BatchItem, Run
from quire.request import Request, SamplingParams
from tests.core.harness import limits
from tests.engine.toy_grammars import ToyGrammars, toy
from tests.fake_executor import FakeExecutor, Pending, expected_tokens
from tests.interrupts import interrupted, paused
from tests.patience import WAIT_S


class InterruptedExecutor(FakeExecutor):
    """Raises KeyboardInterrupt at the moments it is told: before or after a step is submitted, before or after its
    result is there, before and after it is rebuilt."""

    def __init__(self, *sizes: int) -> None:
        self.moments: list[int] = []  # how many moments pass before each interrupt
        self.before_result: Callable[[], None] = lambda: None
        super().__init__(*sizes)

    def submit(self, plan: StepPlan) -> Pending:
        self._moment()
        pending = super().submit(plan)
        self._moment()

        def result():
            self._moment()
            self.before_result()
            found = pending.result()
            self._moment()
            return found

        return Pending(result, pending.sample)

    def reset(self) -> None:
        self._moment()
        super().reset()
        self._moment()

    def _moment(self) -> None:
        if self.moments:
            self.moments[0] -= 1
            if self.moments[0] < 0:
                self.moments.pop(0)
                raise KeyboardInterrupt


class WatchedEngine(Engine):
    """Calls `before_abort` before it aborts a request."""

    before_abort: Callable[[], None] = staticmethod(lambda: None)

    def abort(self, request_id: int) -> None:
        self.before_abort()
        super().abort(request_id)


class Model:
    """What `quire.LLM` is apart from its text."""

    def __init__(self, **changes: object) -> None:
        chosen = limits(**({"num_pages": 40, "max_burst": 2} | changes))
        self.executor = InterruptedExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size)
        scheduler = Scheduler(chosen, lambda: 0.0)
        self.engine = WatchedEngine(scheduler, self.executor, 1, ToyGrammars(), max_burst_s=float("inf"))
        self.stepper = EngineStepper(self.engine)
        self._ids = count(1)
        self.errors: list[QuireError] = []

    def requests(self, number: int, max_tokens: int = 6) -> list[Request]:
        greedy = SamplingParams(temperature=0)
        prompts = [tuple(range(n, n + 3 + 5 * n)) for n in range(1, number + 1)]
        return [Request(next(self._ids), prompt, max_tokens, greedy) for prompt in prompts]

    def stream(self, requests: list[Request]) -> Iterator[Delta]:
        items = [BatchItem(one, None, [CompletionBuilder(one.prompt, None, (), True)]) for one in requests]
        self.items = items
        return iter(Run(self.stepper, items, lambda index, error: self.errors.append(error)))

    def begin(self, requests: list[Request]) -> tuple[Iterator[Delta], list[BatchItem]]:
        stream = self.stream(requests)
        return stream, self.items

    def answers(self, begun: tuple[Iterator[Delta], list[BatchItem]]) -> list[Completion]:
        stream, items = begun
        list(stream)
        return [answer.completion for item in items for answer in item.answers]

    def generate(self, requests: list[Request]) -> list[Completion]:
        return self.answers(self.begin(requests))

    def check(self) -> None:
        """The next answers are right, and then nothing is left."""
        requests = self.requests(4)
        answers = self.generate(requests)
        assert [one.token_ids for one in answers] == [expected_tokens(one) for one in requests]
        scheduler = self.engine.scheduler
        assert self.engine.is_idle
        scheduler.check()
        assert scheduler.stats().free_pages + scheduler.stats().cached_pages == scheduler.limits.num_pages - 1
        assert not scheduler.repair(thorough=True)


@given(moments=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_the_next_answers_are_right_after_an_interrupt_in_the_executor(moments: list[int]) -> None:
    model = Model()
    model.executor.moments = moments
    with suppress(KeyboardInterrupt):
        model.generate(model.requests(3))
    for _ in moments:  # those that are left strike while it starts over, and in what comes then
        with suppress(KeyboardInterrupt):
            model.generate(model.requests(2))
    model.executor.moments = []
    model.check()


@pytest.mark.parametrize("moment", range(8))
def test_an_interrupt_is_told_to_the_caller(moment: int) -> None:
    model = Model()
    model.executor.moments = [moment]
    with pytest.raises(KeyboardInterrupt):
        model.generate(model.requests(3))
    model.check()


@settings(max_examples=300)
@given(after_lines=st.lists(st.integers(0, 8000), min_size=1, max_size=3), is_guided=st.booleans())
def test_the_next_answers_are_right_after_an_interrupt_at_any_line(after_lines: list[int], is_guided: bool) -> None:
    model = Model(num_pages=12)
    model.generate(model.requests(1))
    with interrupted(*after_lines):
        for _ in after_lines:
            with suppress(KeyboardInterrupt):
                requests = model.requests(3, max_tokens=9)
                if is_guided:
                    requests[0] = replace(requests[0], grammar=toy(2), end_ids=(0,))
                model.generate(requests)
    model.check()


def test_closing_a_stream_ends_its_requests() -> None:
    model = Model()
    stream = model.stream(model.requests(3, max_tokens=20))
    next(stream)
    assert model.engine.scheduler.num_running == 3
    stream.close()  # type: ignore[attr-defined]
    assert model.engine.scheduler.num_running == 0
    model.check()


@settings(max_examples=100)
@given(before=st.integers(1, 4), after_lines=st.integers(0, 400))
def test_an_interrupt_while_a_stream_is_closed_leaves_nothing_behind(before: int, after_lines: int) -> None:
    model = Model()
    stream = model.stream(model.requests(3, max_tokens=30))
    for _ in range(before):
        next(stream)
    with interrupted(after_lines), suppress(KeyboardInterrupt):
        stream.close()  # type: ignore[attr-defined]
    model.check()
    assert model.engine.scheduler.counters.steps < 40, "what was closed went on"


def test_a_stream_beside_an_interrupted_one_hears_of_it() -> None:
    model = Model()
    other = model.stream(model.requests(1, max_tokens=20))
    first = next(other)
    assert first.token_ids
    stream = model.stream(model.requests(2))
    model.executor.moments = [3]
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert list(other) == []
    (error,) = model.errors
    assert isinstance(error, RequestFailed)
    assert "interrupted" in error.message
    model.check()


def test_a_stream_that_is_collected_in_the_middle_of_a_step_is_ended_after_it() -> None:
    """The garbage collector closes a stream that its owner dropped, whatever the engine does at the time."""
    model = Model()
    dropped = [model.stream(model.requests(2, max_tokens=30))]
    next(dropped[0])
    model.executor.before_result = dropped.clear
    requests = model.requests(3)
    answers = model.generate(requests)
    assert not dropped
    assert [one.token_ids for one in answers] == [expected_tokens(one) for one in requests]
    assert model.engine.is_idle
    model.check()


def in_threads(*work: Callable[[], None]) -> None:
    """Run all of it at the same time. Raises what one of them raises."""
    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(one) for one in work]:
            future.result(WAIT_S)


def test_threads_get_their_own_answers_from_steps_that_they_share() -> None:
    model = Model()
    asked = [model.requests(number) for number in (3, 1, 2, 4)]
    found: dict[int, list[list[int]]] = {}
    together = threading.Barrier(len(asked))

    def ask(thread: int) -> None:
        together.wait(WAIT_S)
        found[thread] = [one.token_ids for one in model.answers(model.begin(asked[thread]))]

    in_threads(*(partial(ask, thread) for thread in range(len(asked))))
    assert [found[thread] for thread in range(4)] == [[expected_tokens(one) for one in part] for part in asked]
    model.check()


def test_prompts_of_two_threads_are_in_one_step() -> None:
    model = Model()
    first, second = model.begin(model.requests(1, max_tokens=30)), model.begin(model.requests(1, max_tokens=30))
    next(first[0])
    thread = threading.Thread(target=lambda: next(second[0]))
    thread.start()
    thread.join(WAIT_S)
    assert model.engine.scheduler.num_running == 2
    in_threads(lambda: list(first[0]) and None, lambda: list(second[0]) and None)
    model.check()


@pytest.mark.parametrize("moment", range(24))
def test_an_interrupt_in_the_main_thread_leaves_the_answers_of_others_alone(moment: int) -> None:
    """Whatever the main thread does at that time."""
    model = Model(max_burst=1)
    theirs, ours = model.requests(2, max_tokens=25), model.requests(2, max_tokens=25)
    other = model.begin(theirs)
    began, is_interrupted = threading.Event(), threading.Event()
    found: list[list[int]] = []

    def ask() -> None:
        next(other[0])
        began.set()
        assert is_interrupted.wait(WAIT_S)
        found.extend(one.token_ids for one in model.answers(other))

    thread = threading.Thread(target=ask)
    thread.start()
    assert began.wait(WAIT_S)
    mine = model.begin(ours)
    with interrupted(moment * 3), suppress(KeyboardInterrupt):
        model.answers(mine)
    mine[0].close()  # type: ignore[attr-defined]
    is_interrupted.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert [len(tokens) for tokens in found] == [25, 25]
    assert found == [expected_tokens(one) for one in theirs]
    assert not model.errors
    model.check()


@pytest.fixture
def interrupt_main() -> Iterator[Callable[[], None]]:
    """Raises KeyboardInterrupt in the main thread, also where it waits."""
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    yield lambda: signal.pthread_kill(main, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_a_request_that_is_added_after_its_thread_was_interrupted_is_ended(interrupt_main: Callable[[], None]) -> None:
    """As long as other threads have requests, another thread adds those of the main thread."""
    model = Model()
    other = model.begin(model.requests(1, max_tokens=10))
    in_threads(lambda: next(other[0]) and None)
    left = model.stream(model.requests(1, max_tokens=40))
    next(left)
    left.close()  # type: ignore[attr-defined]
    is_closed = threading.Event()

    def interrupt() -> None:
        interrupt_main()
        assert is_closed.wait(WAIT_S)

    model.engine.before_abort = interrupt  # of what is left, before the next request is added
    mine = model.begin(model.requests(1, max_tokens=40))
    with pytest.raises(KeyboardInterrupt):
        model.answers(mine)
    model.engine.before_abort = lambda: None
    is_closed.set()
    in_threads(lambda: model.answers(other) and None)
    assert model.engine.is_idle
    model.check()


@pytest.mark.parametrize("lines", range(0, 60, 4))
def test_a_thread_that_stops_anywhere_before_its_turn_is_not_in_the_way_of_the_other(lines: int) -> None:
    model = Model()
    (asked,) = requests = model.requests(1, max_tokens=20)
    stream = model.stream(requests)
    tokens = list(next(stream).token_ids)
    is_there, may_go_on = threading.Event(), threading.Event()
    others = model.begin(model.requests(1))

    def ask() -> None:
        with paused(lines, is_there, may_go_on):
            model.answers(others)
        is_there.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert is_there.wait(WAIT_S)
    threading.Timer(0.3, may_go_on.set).start()  # it may have the turn: then the other waits for it
    tokens += [token for delta in stream for token in delta.token_ids]
    thread.join(WAIT_S)
    assert tokens == expected_tokens(asked)
    model.check()


def test_a_stream_may_go_on_in_another_thread() -> None:
    model = Model()
    (asked,) = requests = model.requests(1)
    stream = model.stream(requests)
    tokens = list(next(stream).token_ids)
    thread = threading.Thread(target=lambda: tokens.extend(t for delta in stream for t in delta.token_ids))
    thread.start()
    thread.join(WAIT_S)
    assert tokens == expected_tokens(asked)
    model.check()
