"""The order in which programs are made and first run on a GPU, where XLA may time kernels."""

from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from threading import Event
from typing import Any

import pytest

from quire.executor.programs.ladder import StepShape
from quire.executor.programs.programs import Programs
from quire.executor.programs.table import Key
from quire.executor.programs.timed_programs import TimedPrograms
from quire.executor.sample.sampler import Sampled
from quire.models.checkpoint import load_weights
from quire.models.registry import build_model
from tests.executor.rig import FEW_SHAPES, config_of
from tests.models.tiny import NamedTensors
from tests.patience import WAIT_S

SHAPES = replace(FEW_SHAPES, min_tokens=1, burst=4, specialised=True)


class Recorded(Programs):
    """Its programs note that they are made and run, and do nothing; those of one kind are made when they may be."""

    waiting = "burst"
    may_tune: Event
    made: list[Key]
    ran: list[Key]

    def _make(self, key: Key) -> Any:
        if key[0] == self.waiting:
            assert self.may_tune.wait(WAIT_S)
        self.made.append(key)

        def run(*given: Any) -> Any:
            self.ran.append(key)
            return given[0] if key[0] in ("start", "copy", "force") else (given[1], Sampled(None))

        return run


class TimedDecodes(TimedPrograms):
    def is_timed(self, key: Key) -> bool:
        return key[0] == "decode"


@pytest.fixture
def untimed() -> Recorded:
    model = build_model(config_of("llama", num_hidden_layers=1))
    made = Recorded(model, load_weights(model, NamedTensors(model), dtype="float32"), SHAPES, 2)
    made.may_tune, made.made, made.ran = Event(), [], []
    return made


@pytest.fixture
def programs(untimed: Recorded) -> Recorded:
    """XLA times the products of decodes."""
    untimed._timed, untimed.waiting = TimedDecodes(untimed.compiler), "decode"
    return untimed


def test_every_program_runs_once_before_it_is_needed_and_none_while_others_are_timed(programs: Recorded) -> None:
    state = programs.compiler.empty_state()
    for share in programs.compile_all():
        before = len(programs.ran)
        is_timing = not programs.may_tune.is_set()
        state = programs.rehearse(state)
        assert not (is_timing and len(programs.ran) > before)
        # Those that wait for the timed ones stand last, so that all others are done by then.
        if share and len(programs.made) > 10:
            programs.may_tune.set()
    state = programs.rehearse(state)  # those that were there before the first had run
    assert sorted(map(str, programs.ran)) == sorted(map(str, programs.made))
    assert len(set(programs.ran)) == len(programs.ran) > 20
    programs.rehearse(state)
    assert len(set(programs.ran)) == len(programs.ran)
    programs.close()


def test_programs_with_the_products_of_a_decode_are_compiled_after_it(programs: Recorded) -> None:
    shares = programs.compile_all()
    next(shares)
    others = [key for batch in programs._batches for key in batch if key[0] != "decode" and not waits_for_a_decode(key)]
    while len(programs.made) < len(others):
        next(shares)
    assert not any(waits_for_a_decode(key) for key in programs.made)
    programs.may_tune.set()
    assert list(shares)[-1] == 1
    sizes = [shape.tokens for shape in SHAPES.ladder.decodes]
    assert len(sizes) > 1
    for rows in sizes:
        timed = programs.made.index(("decode", rows))
        assert timed < min(programs.made.index(key) for key in (("burst", rows), StepShape(rows, decodes_only=True)))
    programs.close()


def test_closing_ends_those_that_wait_for_another(programs: Recorded) -> None:
    shares = programs.compile_all()
    next(shares)
    waiting = [future for key, future in programs._compiling.items() if waits_for_a_decode(key)]
    programs.close()
    programs.may_tune.set()
    assert waiting
    for future in waiting:
        with suppress(CancelledError):
            future.exception(WAIT_S)


def test_nothing_can_run_while_kernels_are_timed(programs: Recorded) -> None:
    shares = programs.compile_all()
    next(shares)
    while not programs.table.keys.issuperset(programs.order.first):
        assert not programs.can_run_anything
        programs.may_tune.set() if len(programs.made) > 10 else next(shares)
        next(shares)
    programs.close()


def test_a_server_begins_with_the_first_programs_and_the_others_run_for_the_first_time_later(untimed: Recorded) -> None:
    state = untimed.compiler.empty_state()
    for _ in untimed.compile_all():
        state = untimed.rehearse(state)
        if untimed.can_run_anything:
            break
        assert set(untimed.ran) <= {*untimed.order.first}
    assert set(untimed.ran) >= {*untimed.order.first}
    untimed.may_tune.set()  # bursts are among the others
    later: list[float | None] = []
    while not later or later[-1] is not None:
        state, wait_s = untimed.rehearse_one(state)
        later.append(wait_s)
    assert len(set(untimed.ran)) == len(untimed.ran) == len(untimed.made)
    assert 0.0 in later
    untimed.close()


def waits_for_a_decode(key: Key) -> bool:
    return key.decodes_only if isinstance(key, StepShape) else key[0] == "burst"
