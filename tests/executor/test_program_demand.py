"""The order in which a server on a GPU makes programs: by the padding that they save, and would have saved."""

from dataclasses import replace
from itertools import pairwise
from threading import Event
from typing import Any

import pytest

from quire.executor.programs.demand import FIRST_RUN_TOKENS, ProgramDemand
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.order import WAYS, ProgramOrder
from quire.executor.programs.table import Key, ProgramTable
from quire.executor.sample.sampler import NOTHING_ASKED
from quire.executor.shapes import Shapes
from quire.models.checkpoint import load_weights
from quire.models.registry import build_model
from tests.executor.rig import config_of
from tests.executor.test_rehearsal import Recorded
from tests.models.tiny import NamedTensors
from tests.patience import WAIT_S

SHAPES = Shapes(
    num_pages=64, page_size=32, num_slots=256, max_prefill_tokens=8192, max_sequence_tokens=512, min_tokens=8,
    is_fine=True, specialised=True, max_fresh_sequences=8, burst=4, shared_groups=(0,),
)  # fmt: skip
ORDER = ProgramOrder(SHAPES)
KEYS = [key for batch in ORDER.batches for key in batch]


@pytest.fixture
def demand() -> ProgramDemand:
    made = ProgramDemand(SHAPES.ladder, KEYS, WAYS)
    made.is_noted = True
    return made


@pytest.fixture
def first() -> ProgramTable:
    return ProgramTable(SHAPES.ladder, ORDER.first)


def most_missed(demand: ProgramDemand) -> Key:
    return min(KEYS, key=demand.rank)


def test_as_long_as_none_is_missed_programs_are_made_in_their_order(demand: ProgramDemand) -> None:
    assert sorted(KEYS, key=demand.rank) == KEYS


def test_a_step_in_a_larger_program_misses_the_one_with_the_least_padding(
    demand: ProgramDemand, first: ProgramTable
) -> None:
    for tokens, count in ((600, 1), (300, 3)):
        for _ in range(count):
            needed = StepShape(tokens)
            demand.note_forward(needed, 4, first.forward(needed, 4))
    # 1,024 - 640 tokens once are less than 512 - 320 three times.
    assert sorted(KEYS, key=demand.rank)[:2] == [StepShape(320), StepShape(640)]
    demand.note_forward(StepShape(512), 4, StepShape(512))
    demand.note_forward(StepShape(600), 4, first.forward(StepShape(600), 4))
    assert most_missed(demand) == StepShape(640)


def test_nothing_is_noted_before_a_server_on_a_gpu_begins(demand: ProgramDemand, first: ProgramTable) -> None:
    demand.is_noted = False
    demand.note_forward(StepShape(600), 4, first.forward(StepShape(600), 4))
    demand.note_decode(100, 1, 4, False, None, first)
    demand.note_sample(3, NOTHING_ASKED, ("any", 256))
    assert most_missed(demand) == KEYS[0]


def test_decodes_miss_the_one_program_that_does_them_and_not_that_of_their_forward_pass(
    demand: ProgramDemand, first: ProgramTable
) -> None:
    assert first.decode(100, 1, 4) is None
    demand.note_decode(100, 1, 4, False, None, first)
    needed = StepShape(100, decodes_only=True)
    demand.note_forward(needed, 0, first.forward(needed, 0))
    assert most_missed(demand) == ("decode", 128)
    assert demand.rank(StepShape(128, decodes_only=True))[0] == 0
    # Those that ask for more than tokens have no such program.
    demand.note_forward(needed, 0, first.forward(needed, 0))
    assert demand.rank(StepShape(128, decodes_only=True))[0] < 0


def test_a_burst_misses_its_program(demand: ProgramDemand, first: ProgramTable) -> None:
    demand.note_decode(8, 4, 4, False, first.decode(8, 4, 4), first)
    demand.note_decode(8, 1, 4, False, first.decode(8, 1, 4), first)
    assert most_missed(demand) == ("burst", 8)


def test_samples_miss_a_way_without_branches_more_than_one_for_fewer_rows(demand: ProgramDemand) -> None:
    filters = NOTHING_ASKED._replace(filters=True)
    demand.note_sample(8, NOTHING_ASKED, ("plain", 64))
    demand.note_sample(60, filters, ("any", 64))
    assert sorted(KEYS, key=demand.rank)[:2] == [("filtered", 64), ("plain", 8)]


def test_guesses_miss_the_one_program_that_verifies_them() -> None:
    shapes = replace(SHAPES, guesses=4)
    keys = [key for batch in ProgramOrder(shapes).batches for key in batch]
    demand = ProgramDemand(shapes.ladder, keys, WAYS)
    demand.note_verify(20, None)
    assert min(keys, key=demand.rank) == keys[0]
    demand.is_noted = True
    demand.note_verify(20, None)
    best = ProgramTable(shapes.ladder, keys).verify(20)
    assert best is not None
    assert min(keys, key=demand.rank) == best
    missed = demand.rank(best)
    demand.note_verify(20, best)
    assert demand.rank(best) == missed
    demand.note_verify(20, (best[0], 2 * best[1]))
    assert demand.rank(best) < missed


def test_a_first_run_is_worth_it_once_its_time_was_lost(demand: ProgramDemand, first: ProgramTable) -> None:
    key, padding = StepShape(320), 512 - 320
    for count in range(1, 1 + int(FIRST_RUN_TOKENS // padding) + 1):
        assert not demand.is_worth_a_first_run(key), count
        demand.note_forward(StepShape(300), 4, first.forward(StepShape(300), 4))
    assert demand.is_worth_a_first_run(key)
    assert not demand.is_worth_a_first_run(StepShape(384))
    assert not demand.is_worth_a_first_run(("decode", 128))
    assert demand.is_worth_a_first_run(("start", 8))


def test_a_single_sequence_is_decoded_by_a_program_for_one() -> None:
    assert StepShape(1, decodes_only=True) in ORDER.for_one(100)
    on_a_cpu = ProgramOrder(Shapes(64, 32, 32, 512, 512))
    assert [key for key in on_a_cpu.for_one(100) if isinstance(key, StepShape)] == [StepShape(128), StepShape(1)]


def test_on_a_gpu_programs_for_prompts_beside_decodes_come_before_all_but_those_for_decodes() -> None:
    rest = KEYS[len(ORDER.first) :]
    soon = [
        key for key in rest if isinstance(key, StepShape) and key == StepShape(key.tokens) and 128 < key.tokens < 1024
    ]
    kinds = {key[0] for key in rest[: rest.index(soon[-1])] if not isinstance(key, StepShape)}
    assert kinds == {"decode", "burst", "start", "copy"}
    assert {key.tokens for key in rest[: rest.index(soon[-1])] if isinstance(key, StepShape)} < {
        192,
        320,
        384,
        448,
        640,
        768,
        896,
    }
    # Each halves the widest gap that is left: a step of 513 to 768 tokens is padded to 1,024 before all others are.
    assert [key.tokens for key in soon[:3]] == [768, 384, 640]
    assert set(KEYS) == {*ORDER.first, *ORDER.early, *SHAPES.ladder.all(), *KEYS}
    assert len(set(KEYS)) == len(KEYS)


def test_on_a_cpu_the_order_is_that_of_compile_time() -> None:
    order = ProgramOrder(replace(SHAPES, is_fine=False, specialised=False))
    assert order.batches[:2] == [order.first, order.early]
    sizes = [
        key.tokens for batch in order.batches[2:] for key in batch if isinstance(key, StepShape) and not key.scores
    ]
    plain = [size for size in sizes if size >= 256]
    assert all(low < high for low, high in pairwise(plain[: len(set(plain))]))


class Held(Recorded):
    """Those behind the first are made when they may be."""

    has_begun: Event

    def _make(self, key: Key) -> Any:
        if key not in self.order.first:
            self.has_begun.set()
            assert self.may_tune.wait(WAIT_S)
        return super()._make(key)


def test_a_server_makes_the_program_that_its_steps_miss_next_and_cuts_prompts_for_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_model(config_of("llama", num_hidden_layers=1))
    programs = Held(model, load_weights(model, NamedTensors(model), dtype="float32"), SHAPES, 1)
    programs.waiting = "none"
    programs.may_tune, programs.has_begun, programs.made, programs.ran = Event(), Event(), [], []
    for _ in programs.compile_all():
        if {*programs._made}.issuperset(programs.order.first):
            break
    programs._runs.done |= {*programs.order.first}
    assert programs.step_sizes == ()
    programs.begin_serving()
    programs.advance()
    assert programs.step_sizes == (256, 512, 1024, 2048, 8448)
    assert programs.has_begun.wait(WAIT_S)
    missed = StepShape(7168)  # one of the last
    assert programs.forward(StepShape(7000), 220)[0] == StepShape(8448)
    programs.may_tune.set()
    programs._pool.shutdown(wait=True)
    later = programs.made[len(programs.order.first) :]
    assert later[1] == missed
    assert [later[0], *later[2:]] == [key for key in KEYS[len(ORDER.first) :] if key != missed]
    programs.advance()
    assert programs.step_sizes == SHAPES.ladder.cut_sizes
    monkeypatch.setattr(programs._step_costs, "next_size", lambda _: None)
    monkeypatch.setattr(programs._step_costs, "conclude", lambda: (frozenset(), (512, 2048)))
    programs.measure_one(None)  # type: ignore[arg-type]
    assert programs.step_sizes == (512, 2048), "those that were timed"
    programs.close()
