"""First runs of programs beside requests: few, and those that steps want."""

from collections.abc import Callable
from typing import Any

import pytest

from quire.executor.programs.kinds import Key
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.programs import Programs
from quire.executor.programs.scheduler import SELDOM_SHARE, SHARE
from quire.executor.shapes import Shapes
from tests.executor.recorded import Clock, RecordedCompiler
from tests.executor.test_rehearsal import SHAPES, replace


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def programs(clock: Clock) -> Programs:
    return Programs(RecordedCompiler(SHAPES), 2, clock=clock)


def slow(clock: Clock, took_s: float) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        clock.now_s += took_s
        return arguments

    return run


def test_the_next_first_run_waits_until_the_last_took_a_small_share_of_the_time(
    programs: Programs, clock: Clock
) -> None:
    scheduler = programs.scheduler
    assert scheduler.allows_first_run
    assert scheduler.timed(("start", 1), slow(clock, 0.1))(1) == (1,)
    assert scheduler.ran == {("start", 1)}
    assert not scheduler.allows_first_run
    clock.now_s = 100.0 + 0.1 / SHARE - 0.01
    assert not scheduler.allows_first_run
    clock.now_s += 0.02
    assert scheduler.allows_first_run


def test_two_first_runs_of_one_step_count_as_two(programs: Programs, clock: Clock) -> None:
    scheduler = programs.scheduler
    for size in (1, 8):
        scheduler.timed(("start", size), slow(clock, 0.1))()
    clock.now_s = 100.0 + 0.2 / SHARE - 0.01
    assert not scheduler.allows_first_run
    clock.now_s += 0.02
    assert scheduler.allows_first_run


def served(programs: Programs, shapes: Shapes = SHAPES) -> set[Key]:
    """Let a server begin. Returns the programs that have not run."""
    state = programs.compiler.empty_state()
    for _ in programs.compile_all():
        if shapes.specialised and not programs.can_run_anything:
            state = programs.rehearse(state)
    programs.begin_serving()
    programs.advance()
    return set(programs.table.keys - programs.scheduler.ran)


def missed(programs: Programs, left: set[Key]) -> StepShape:
    """Let steps miss a program until it is worth its first run."""
    key = next(key for key in left if isinstance(key, StepShape) and not key.scores and not key.decodes_only)
    while not programs.scheduler.is_worth_a_first_run(key):
        programs.forward(key, 1)
    return key


def test_between_first_runs_a_server_chooses_among_programs_that_have_run(programs: Programs, clock: Clock) -> None:
    left = served(programs)
    assert left
    everything = programs.table.keys
    ran = everything - left
    key = next(key for key in left if isinstance(key, StepShape) and not key.scores and not key.decodes_only)
    assert programs.forward(key, 1)[0] == key
    assert programs.table.keys == everything  # the table of a step stays as it is
    programs.scheduler.timed(key, slow(clock, 0.1))()
    programs.advance()
    assert programs.table.keys == ran | {key}
    assert programs.table.keys.issuperset(programs.catalog.first)
    assert programs.num_late == 0
    clock.now_s += 0.1 / SELDOM_SHARE
    programs.advance()
    assert programs.table.keys == everything
    programs.close()


def test_beside_requests_a_program_runs_for_the_first_time_when_steps_have_missed_it_for_as_long(
    programs: Programs, clock: Clock
) -> None:
    left = served(programs)
    programs.scheduler.timed(("start", 1), slow(clock, 0.1))()
    clock.now_s += 0.1 / SHARE
    programs.advance()
    new = programs.table.keys - programs.scheduler.ran
    assert new == {key for key in left if key[0] in ("start", "copy", "burst")}  # they save more than padding
    key = missed(programs, left)
    programs.advance()
    assert programs.table.keys - programs.scheduler.ran == new | {key}
    assert programs.forward(key, 1)[0] == key
    programs.close()


def test_an_idle_server_first_runs_the_program_that_steps_missed_most(clock: Clock) -> None:
    compiler = RecordedCompiler(SHAPES)
    programs = Programs(compiler, 2, clock=clock)
    left = served(programs)
    programs.scheduler.timed(("start", 1), slow(clock, 1.0))()
    programs.advance()
    key = missed(programs, left)
    before = len(compiler.ran)
    programs.rehearse_one(compiler.empty_state())
    assert compiler.ran[before:] == [key]
    programs.close()


def test_nothing_is_spread_where_first_runs_take_no_longer_than_others(clock: Clock) -> None:
    shapes = replace(SHAPES, specialised=False)
    programs = Programs(RecordedCompiler(shapes), 2, clock=clock)
    left = served(programs, shapes)
    programs.scheduler.timed(next(iter(left)), slow(clock, 9.0))()
    keys = programs.table.keys
    programs.advance()
    assert programs.table.keys == keys
    programs.close()
