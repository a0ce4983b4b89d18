"""The order in which programs are made and first run on a GPU, where XLA may time kernels."""

from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace

import pytest

from quire.executor.programs.kinds import Key
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.programs import Programs
from tests.executor.recorded import RecordedCompiler
from tests.executor.rig import FEW_SHAPES
from tests.patience import WAIT_S, wait_until

SHAPES = replace(FEW_SHAPES, min_tokens=1, burst=4, specialised=True)


@pytest.fixture
def compiler() -> RecordedCompiler:
    """XLA times the products of decodes."""
    return RecordedCompiler(SHAPES, lambda key: key[0] == "decode", times=True)


@pytest.fixture
def programs(compiler: RecordedCompiler) -> Programs:
    return Programs(compiler, 2)


def waits_for_a_decode(key: Key) -> bool:
    return key.decodes_only if isinstance(key, StepShape) else key[0] == "burst"


def test_every_program_runs_once_before_it_is_needed_and_none_while_others_are_timed(
    programs: Programs, compiler: RecordedCompiler
) -> None:
    state = compiler.empty_state()
    for share in programs.compile_all():
        before = len(compiler.ran)
        is_timing = not compiler.may_go_on.is_set()
        state = programs.rehearse(state)
        assert not (is_timing and len(compiler.ran) > before)
        # Those that wait for the timed ones stand last, so that all others are done by then.
        if share and len(compiler.made) > 10:
            compiler.may_go_on.set()
    state = programs.rehearse(state)  # those that were there before the first had run
    assert sorted(map(str, compiler.ran)) == sorted(map(str, compiler.made))
    assert len(set(compiler.ran)) == len(compiler.ran) > 20
    programs.rehearse(state)
    assert len(set(compiler.ran)) == len(compiler.ran)
    programs.close()


def test_programs_with_the_products_of_a_decode_are_compiled_after_it(
    programs: Programs, compiler: RecordedCompiler
) -> None:
    shares = programs.compile_all()
    next(shares)
    others = [key for key in programs.catalog.keys if key[0] != "decode" and not waits_for_a_decode(key)]
    while len(compiler.made) < len(others):
        next(shares)
    assert not any(waits_for_a_decode(key) for key in compiler.made)
    compiler.may_go_on.set()
    assert list(shares)[-1] == 1
    sizes = [shape.tokens for shape in SHAPES.ladder.decodes]
    assert len(sizes) > 1
    for rows in sizes:
        timed = compiler.made.index(("decode", rows))
        rest = ("burst", rows), StepShape(rows, decodes_only=True)
        assert timed < min(compiler.made.index(key) for key in rest)
    programs.close()


def test_closing_ends_those_that_wait_for_another(programs: Programs, compiler: RecordedCompiler) -> None:
    shares = programs.compile_all()
    next(shares)
    assert compiler.is_held.wait(WAIT_S)
    programs.close()
    compiler.may_go_on.set()
    wait_until(lambda: programs.num_unfinished == 0)
    assert not any(waits_for_a_decode(key) for key in compiler.made)
    with suppress(CancelledError):
        list(shares)


def test_nothing_can_run_while_kernels_are_timed(programs: Programs, compiler: RecordedCompiler) -> None:
    shares = programs.compile_all()
    next(shares)
    while not programs.table.keys.issuperset(programs.catalog.first):
        assert not programs.can_run_anything
        compiler.may_go_on.set() if len(compiler.made) > 10 else next(shares)
        next(shares)
    programs.close()


def test_a_server_begins_with_the_first_programs_and_the_others_run_for_the_first_time_later() -> None:
    compiler = RecordedCompiler(SHAPES, lambda key: key[0] == "burst")
    programs = Programs(compiler, 2)
    first, state = {*programs.catalog.first}, compiler.empty_state()
    for _ in programs.compile_all():
        state = programs.rehearse(state)
        if programs.can_run_anything:
            break
        assert set(compiler.ran) <= first
    assert set(compiler.ran) >= first
    compiler.may_go_on.set()  # bursts are among the others
    later: list[float | None] = []
    while not later or later[-1] is not None:
        state, wait_s = programs.rehearse_one(state)
        later.append(wait_s)
    assert len(set(compiler.ran)) == len(compiler.ran) == len(compiler.made)
    assert 0.0 in later
    programs.close()
