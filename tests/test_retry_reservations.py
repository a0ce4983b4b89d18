"""A full queue, a crowd that takes every free place, and clients that retry on time."""

from collections import deque
from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.retry_reservations import GRACE_S, LEAD_S, MAX_RESERVATIONS, MAX_WAIT_S, RetryReservations


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Line:
    """As many places as `most`; who is at the head leaves every `interval_s`."""

    def __init__(self, most: int, interval_s: float) -> None:
        self.clock = Clock()
        self.reservations = RetryReservations(most // 2, self.clock)
        self._most = most
        self._interval_s = interval_s
        self._waiting: deque[int] = deque()
        self._next_leave_s = self.clock.now
        self._num_strangers = 1

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        while self._next_leave_s <= self.clock.now:
            self._next_leave_s += self._interval_s
            if self._waiting:
                self._waiting.popleft()

    def ask(self, client: int, places: int = 1) -> int | None:
        """None if it is let in, else the seconds after which it is to come back."""
        length = len(self._waiting)
        kept = self.reservations.num_kept_from(client) if length else 0
        if length + kept + places <= self._most:
            self.reservations.admitted(client)
            self._waiting += [client] * places
            return None
        told = self.reservations.refused(client, places, length * self._interval_s, self._interval_s)
        self.reservations.check()
        return ceil(told)

    def crowd(self) -> None:
        """Strangers, until one is refused. That one asks again the next time, whatever it was told."""
        while self.ask(-self._num_strangers) is None:
            self._num_strangers += 1


@example(most=4, interval_s=0.4, gaps=[0.0, 0.0, 0.0], is_late=False)  # three are due within a second
@given(
    st.integers(4, 64),
    st.sampled_from([0.002, 0.02, 0.1, 0.4]),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=25),
    st.booleans(),
)
@settings(max_examples=60)
def test_a_client_that_retries_on_time_is_admitted_however_many_newcomers_there_are(most, interval_s, gaps, is_late):
    line = Line(most, interval_s)
    line.crowd()
    returning: dict[int, float] = {}
    schedule = deque(gaps)
    arrives_s = line.clock.now
    client = 0
    while schedule or returning:
        line.pass_time(0.05)
        for one in [one for one, at in returning.items() if at <= line.clock.now]:
            assert line.ask(one) is None, "it came back as it was told and was refused"
            del returning[one]
        if schedule and arrives_s <= line.clock.now:
            arrives_s += schedule.popleft()
            client += 1
            told = line.ask(client)
            if told is not None:
                assert 1 <= told < MAX_WAIT_S
                returning[client] = line.clock.now + told + (2 if is_late else 0)
        line.crowd()


def test_each_refused_client_gets_another_time():
    line = Line(8, 0.5)
    line.crowd()
    told = [line.ask(client) for client in range(1, 9)]
    assert told == sorted(told)
    assert len(set(told)) > 3


def test_a_client_that_asks_again_and_again_has_one_reservation_and_keeps_it():
    line = Line(8, 0.5)
    line.crowd()
    first = line.ask(1)
    before = len(line.reservations)
    assert all(line.ask(1) == first for _ in range(100))
    assert len(line.reservations) == before


def test_a_crowd_that_never_comes_back_is_kept_no_more_than_half_and_is_forgotten():
    clock = Clock()
    reservations = RetryReservations(4, clock)
    for client in range(100):
        reservations.refused(client, 1, 0.0, 0.01)
    clock.now += 10
    assert reservations.num_kept_from(1000) == 4
    clock.now += MAX_WAIT_S + GRACE_S
    assert reservations.num_kept_from(1000) == 0
    assert not len(reservations)


def test_nothing_is_kept_long_before_its_time():
    clock = Clock()
    reservations = RetryReservations(4, clock)
    reservations.refused(1, 2, 20.0, 1.0)
    clock.now += 20 - LEAD_S - 0.1
    assert reservations.num_kept_from(2) == 0
    clock.now += 0.2
    assert reservations.num_kept_from(2) == 2


def test_a_crowd_of_any_size_takes_bounded_memory_and_is_told_a_bounded_time():
    clock = Clock()
    reservations = RetryReservations(8, clock)
    told = [reservations.refused(client, 1, 0.0, 0.1) for client in range(MAX_RESERVATIONS + 100)]
    assert len(reservations) == MAX_RESERVATIONS
    assert max(told) == pytest.approx(MAX_WAIT_S)
