"""Programs that wait to be made: each is chosen when a thread is free."""

from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from threading import Event, Lock
from typing import Any

import pytest

from quire.executor.programs.ladder import StepShape
from quire.executor.programs.queue import ProgramQueue
from quire.executor.programs.table import Key
from tests.patience import WAIT_S

KEYS = [StepShape(size) for size in (8, 16, 32, 64)]


class Maker:
    """Makes a program when it is let go on."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = Event(), Event()
        self.made: list[Key] = []
        self.most_at_a_time = 0
        self._now = 0
        self._lock = Lock()

    def __call__(self, key: Key) -> str:
        with self._lock:
            self.made.append(key)
            self._now += 1
            self.most_at_a_time = max(self.most_at_a_time, self._now)
        self.has_begun.set()
        assert self.may_go_on.wait(WAIT_S)
        with self._lock:
            self._now -= 1
        if key == KEYS[-1]:
            raise NotImplementedError("there is no such kernel here")
        return str(key)


@pytest.fixture
def maker() -> Iterator[Maker]:
    made = Maker()
    yield made
    made.may_go_on.set()


@pytest.fixture
def one_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_program_that_is_missed_meanwhile_comes_before_those_that_wait(
    maker: Maker, one_thread: ThreadPoolExecutor
) -> None:
    missed: dict[Key, float] = {}
    queue = ProgramQueue(one_thread, maker, lambda key: (-missed.get(key, 0.0), KEYS.index(key)))  # type: ignore[arg-type]
    futures = [queue.add(key) for key in KEYS[:1]]
    assert maker.has_begun.wait(WAIT_S)
    futures += [queue.add(key) for key in (KEYS[2], KEYS[1])]
    missed[KEYS[2]] = 7.0
    futures.append(queue.add(KEYS[3]))
    missed[KEYS[3]] = 9.0
    maker.may_go_on.set()
    assert [future.result(WAIT_S) for future in futures[:3]] == [str(KEYS[at]) for at in (0, 2, 1)]
    assert maker.made == [KEYS[at] for at in (0, 3, 2, 1)]
    assert isinstance(futures[3].exception(WAIT_S), NotImplementedError)


def test_without_ranks_programs_are_made_as_they_come(maker: Maker, one_thread: ThreadPoolExecutor) -> None:
    queue = ProgramQueue(one_thread, maker, None)
    maker.may_go_on.set()
    order = [KEYS[at] for at in (2, 0, 1)]
    assert [future.result(WAIT_S) for future in [queue.add(key) for key in order]] == [str(key) for key in order]
    assert maker.made == order


def test_no_more_programs_are_made_at_a_time_than_may_be(maker: Maker) -> None:
    with ThreadPoolExecutor(4) as pool:
        queue = ProgramQueue(pool, maker, None)
        queue.limit(1)
        futures = [queue.add(key) for key in KEYS[:3]]
        assert maker.has_begun.wait(WAIT_S)
        maker.may_go_on.set()
        for future in futures:
            future.result(WAIT_S)
    assert maker.most_at_a_time == 1
    assert len(maker.made) == 3


def test_a_program_waits_for_another_whatever_becomes_of_that(maker: Maker, one_thread: ThreadPoolExecutor) -> None:
    queue = ProgramQueue(one_thread, maker, None)
    maker.may_go_on.set()
    others: list[Future[Any]] = [Future() for _ in range(3)]
    waiting = [queue.add(key, other) for key, other in zip(KEYS, others, strict=False)]
    assert queue.add(KEYS[0]).result(WAIT_S) == str(KEYS[0])
    assert maker.made == KEYS[:1]
    others[0].set_result("made")
    others[1].set_exception(RuntimeError("not made"))
    others[2].cancel()
    assert [future.result(WAIT_S) for future in waiting[:2]] == [str(key) for key in KEYS[:2]]
    assert waiting[2].cancelled()


def test_closing_cancels_those_that_wait_and_those_that_come_later(
    maker: Maker, one_thread: ThreadPoolExecutor
) -> None:
    queue = ProgramQueue(one_thread, maker, None)
    other: Future[Any] = Future()
    under_way, waiting, behind = queue.add(KEYS[0]), queue.add(KEYS[1]), queue.add(KEYS[2], other)
    assert maker.has_begun.wait(WAIT_S)
    queue.close()
    other.set_result("made")
    for future in (waiting, behind, queue.add(KEYS[0])):
        with pytest.raises(CancelledError):
            future.result(WAIT_S)
    maker.may_go_on.set()
    assert under_way.result(WAIT_S) == str(KEYS[0])
    assert maker.made == KEYS[:1]
