"""First runs of programs beside requests: few, and those that steps want."""

from dataclasses import replace

import pytest

from quire.executor.programs.first_runs import SELDOM_SHARE, SHARE, FirstRuns
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.table import Key
from tests.executor.test_rehearsal import SHAPES, Recorded, untimed  # noqa: F401  a fixture


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_next_first_run_waits_until_the_last_took_a_small_share_of_the_time(clock: Clock) -> None:
    runs = FirstRuns(SHAPES, clock)

    def slow(number: int) -> int:
        clock.now_s += 0.1
        return number + 1

    assert runs.may_be
    assert runs.timed(("start", 1), slow)(1) == 2
    assert runs.done == {("start", 1)}
    assert not runs.may_be
    clock.now_s = 100.0 + 0.1 / SHARE - 0.01
    assert not runs.may_be
    clock.now_s += 0.02
    assert runs.may_be


def test_two_first_runs_of_one_step_count_as_two(clock: Clock) -> None:
    runs = FirstRuns(SHAPES, clock)

    def slow() -> None:
        clock.now_s += 0.1

    for size in (1, 8):
        runs.timed(("start", size), slow)()
    clock.now_s = 100.0 + 0.2 / SHARE - 0.01
    assert not runs.may_be
    clock.now_s += 0.02
    assert runs.may_be


def served(programs: Recorded, clock: Clock) -> set[Key]:
    """Let a server begin. Returns the programs that have not run."""
    programs._runs = FirstRuns(SHAPES, clock)
    programs.may_tune.set()
    state = programs.compiler.empty_state()
    for _ in programs.compile_all():
        if not programs.can_run_anything:
            state = programs.rehearse(state)
    programs.begin_serving()
    programs.advance()
    return set(programs.table.keys - programs._runs.done)


def miss(programs: Recorded, left: set[Key]) -> StepShape:
    """Let steps miss a program until it is worth its first run."""
    key = next(key for key in left if isinstance(key, StepShape) and not key.scores and not key.decodes_only)
    while not programs._demand.is_worth_a_first_run(key):
        programs.forward(key, 1)
    return key


def test_between_first_runs_a_server_chooses_among_programs_that_have_run(
    untimed: Recorded,  # noqa: F811
    clock: Clock,
) -> None:
    left = served(untimed, clock)
    assert left
    everything = untimed.table.keys
    ran = everything - left
    key = next(key for key in left if isinstance(key, StepShape) and not key.scores and not key.decodes_only)
    assert untimed.forward(key, 1)[0] == key
    assert untimed.table.keys == everything  # the table of a step stays as it is

    def slow() -> None:
        clock.now_s += 0.1

    untimed._runs.timed(key, slow)()
    untimed.advance()
    assert untimed.table.keys == ran | {key}
    assert untimed.table.keys.issuperset(untimed.order.first)
    assert untimed.num_late == 0
    clock.now_s += 0.1 / SELDOM_SHARE
    untimed.advance()
    assert untimed.table.keys == everything
    untimed.close()


def test_beside_requests_a_program_runs_for_the_first_time_when_steps_have_missed_it_for_as_long(
    untimed: Recorded,  # noqa: F811
    clock: Clock,
) -> None:
    left = served(untimed, clock)

    def slow() -> None:
        clock.now_s += 0.1

    untimed._runs.timed(("start", 1), slow)()
    clock.now_s += 0.1 / SHARE
    untimed.advance()
    new = untimed.table.keys - untimed._runs.done
    assert new == {key for key in left if key[0] in ("start", "copy", "burst")}  # they save more than padding
    key = miss(untimed, left)
    untimed.advance()
    assert untimed.table.keys - untimed._runs.done == new | {key}
    assert untimed.forward(key, 1)[0] == key
    untimed.close()


def test_an_idle_server_first_runs_the_program_that_steps_missed_most(
    untimed: Recorded,  # noqa: F811
    clock: Clock,
) -> None:
    left = served(untimed, clock)
    untimed._runs.timed(("start", 1), lambda: clock.__setattr__("now_s", clock.now_s + 1))()
    untimed.advance()
    key = miss(untimed, left)
    before = len(untimed.ran)
    untimed.rehearse_one(untimed.compiler.empty_state())
    assert untimed.ran[before:] == [key]
    untimed.close()


def test_nothing_is_spread_where_first_runs_take_no_longer_than_others(
    untimed: Recorded,  # noqa: F811
    clock: Clock,
) -> None:
    untimed._shapes = replace(SHAPES, specialised=False)
    left = served(untimed, clock)
    untimed._runs.timed(next(iter(left)), lambda: clock.__setattr__("now_s", clock.now_s + 9))()
    keys = untimed.table.keys
    untimed.advance()
    assert untimed.table.keys == keys
    untimed.close()
