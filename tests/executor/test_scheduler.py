"""Programs are made by what they are expected to save, and what steps miss, per second that they cost."""

from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from itertools import pairwise
from threading import Event, Lock
from typing import Any

import pytest

from quire.executor.programs.catalog import Catalog
from quire.executor.programs.kinds import KINDS, Key
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.programs import Programs
from quire.executor.programs.scheduler import FIRST_RUN_TOKENS, CompileScheduler
from quire.executor.programs.table import ProgramTable
from quire.executor.sample.sampler import NOTHING_ASKED
from quire.executor.shapes import Shapes
from tests.executor.recorded import RecordedCompiler
from tests.patience import WAIT_S

SHAPES = Shapes(
    num_pages=64, page_size=32, num_slots=256, max_prefill_tokens=8192, max_sequence_tokens=512, min_tokens=8,
    is_fine=True, specialised=True, max_fresh_sequences=8, burst=4, shared_groups=(0,),
)  # fmt: skip
ON_CPU = replace(SHAPES, is_fine=False, specialised=False)
CATALOG = Catalog(SHAPES)
KEYS = CATALOG.keys
LATER = KEYS[len(CATALOG.first) :]


class Untimed:
    """XLA times no products."""

    def times_decodes(self, rows: int) -> bool:
        return False

    def times_few(self, rows: int) -> bool:
        return False


class Maker:
    """Makes a program when it is let go on."""

    def __init__(self, failing: Key | None = None) -> None:
        self.has_begun, self.may_go_on = Event(), Event()
        self.made: list[Key] = []
        self.most_at_a_time = 0
        self._failing = failing
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
        if key == self._failing:
            raise NotImplementedError("there is no such kernel here")
        return str(key)


def scheduled(shapes: Shapes = SHAPES, make: Any = str, threads: int = 1) -> CompileScheduler:
    scheduler = CompileScheduler(Catalog(shapes), shapes, Untimed(), make, threads)
    scheduler.is_noted = True
    return scheduler


@pytest.fixture
def scheduler() -> Iterator[CompileScheduler]:
    made = scheduled()
    yield made
    made.close()


@pytest.fixture
def maker() -> Iterator[Maker]:
    made = Maker()
    yield made
    made.may_go_on.set()


@pytest.fixture
def first() -> ProgramTable:
    return ProgramTable(SHAPES.ladder, CATALOG.first)


def ranked(scheduler: CompileScheduler) -> list[Key]:
    return sorted(LATER, key=scheduler.score, reverse=True)


def test_as_long_as_none_is_missed_programs_are_made_in_their_order(scheduler: CompileScheduler) -> None:
    assert ranked(scheduler) == LATER


def test_a_step_in_a_larger_program_misses_the_one_with_the_least_padding(
    scheduler: CompileScheduler, first: ProgramTable
) -> None:
    before = {key: scheduler.score(key) for key in KEYS}
    for tokens, count in ((600, 1), (300, 3)):
        for _ in range(count):
            needed = StepShape(tokens)
            scheduler.note_forward(needed, 4, first.forward(needed, 4))
    gained = {key: scheduler.score(key) - score for key, score in before.items() if scheduler.score(key) > score}
    assert gained == {StepShape(320): 3 * (512 - 320), StepShape(640): 1024 - 640}
    scheduler.note_forward(StepShape(512), 4, StepShape(512))
    scheduler.note_forward(StepShape(600), 4, first.forward(StepShape(600), 4))
    assert scheduler.score(StepShape(640)) > scheduler.score(StepShape(320)) > scheduler.score(("burst", 8))


def test_nothing_is_noted_before_a_server_on_a_gpu_begins(scheduler: CompileScheduler, first: ProgramTable) -> None:
    scheduler.is_noted = False
    scheduler.note_forward(StepShape(600), 4, first.forward(StepShape(600), 4))
    scheduler.note_decode(100, 1, False, None, first)
    scheduler.note_sample(3, NOTHING_ASKED, ("any", 256))
    assert ranked(scheduler) == LATER


def test_decodes_miss_the_one_program_that_does_them_and_not_that_of_their_forward_pass(
    scheduler: CompileScheduler, first: ProgramTable
) -> None:
    two = StepShape(128, decodes_only=True)
    before = scheduler.score(two), scheduler.score(("decode", 128))
    assert first.decode(100, 1, 4) is None
    scheduler.note_decode(100, 1, False, None, first)
    needed = StepShape(100, decodes_only=True)
    scheduler.note_forward(needed, 0, first.forward(needed, 0))
    assert scheduler.score(two) == before[0]
    assert scheduler.score(("decode", 128)) > before[1]
    # Those that ask for more than tokens have no such program.
    scheduler.note_forward(needed, 0, first.forward(needed, 0))
    assert scheduler.score(two) > before[0]


def test_a_burst_misses_its_program(scheduler: CompileScheduler, first: ProgramTable) -> None:
    before = scheduler.score(("burst", 8)), scheduler.score(("decode", 8))
    scheduler.note_decode(8, 4, False, first.decode(8, 4, 4), first)
    scheduler.note_decode(8, 1, False, first.decode(8, 1, 4), first)
    assert scheduler.score(("burst", 8)) > before[0]
    assert scheduler.score(("decode", 8)) == before[1]


def test_samples_miss_a_way_without_branches_more_than_one_for_fewer_rows(scheduler: CompileScheduler) -> None:
    ways: list[Key] = [("plain", 8), ("filtered", 64)]
    before = [scheduler.score(key) for key in ways]
    scheduler.note_sample(8, NOTHING_ASKED, ("plain", 64))
    scheduler.note_sample(60, NOTHING_ASKED._replace(filters=True), ("any", 64))
    fewer, without = (scheduler.score(key) - score for key, score in zip(ways, before, strict=True))
    assert 0 < fewer < without


def test_guesses_miss_the_one_program_that_verifies_them() -> None:
    shapes = replace(SHAPES, guesses=4)
    scheduler = scheduled(shapes)
    best = ProgramTable(shapes.ladder, Catalog(shapes).keys).verify(20)
    assert best is not None
    scheduler.is_noted = False
    expected = scheduler.score(best)
    scheduler.note_verify(20, None)
    assert scheduler.score(best) == expected
    scheduler.is_noted = True
    scheduler.note_verify(20, None)
    missed = scheduler.score(best)
    assert missed > expected
    scheduler.note_verify(20, best)
    assert scheduler.score(best) == missed
    scheduler.note_verify(20, (best[0], 2 * best[1]))
    assert scheduler.score(best) > missed
    scheduler.close()


def test_a_first_run_is_worth_it_once_its_time_was_lost(scheduler: CompileScheduler, first: ProgramTable) -> None:
    key, padding = StepShape(320), 512 - 320
    for count in range(1, 1 + int(FIRST_RUN_TOKENS // padding) + 1):
        assert not scheduler.is_worth_a_first_run(key), count
        scheduler.note_forward(StepShape(300), 4, first.forward(StepShape(300), 4))
    assert scheduler.is_worth_a_first_run(key)
    assert not scheduler.is_worth_a_first_run(StepShape(384))
    assert not scheduler.is_worth_a_first_run(("decode", 128))
    assert scheduler.is_worth_a_first_run(("start", 8))


def test_a_program_that_is_missed_meanwhile_comes_before_those_that_wait(maker: Maker, first: ProgramTable) -> None:
    scheduler = scheduled(make=maker)
    futures = [scheduler.add(("plain", 8), {})]
    assert maker.has_begun.wait(WAIT_S)
    futures += [scheduler.add(key, {}) for key in (StepShape(3072), StepShape(1536))]
    scheduler.note_forward(StepShape(3000), 94, first.forward(StepShape(3000), 94))
    maker.may_go_on.set()
    assert [future.result(WAIT_S) for future in futures] == [str(("plain", 8)), "3072 tokens", "1536 tokens"]
    assert maker.made == [("plain", 8), StepShape(3072), StepShape(1536)]
    scheduler.close()


def test_on_a_cpu_programs_are_made_as_they_come(maker: Maker) -> None:
    scheduler = scheduled(ON_CPU, maker)
    maker.may_go_on.set()
    order = [StepShape(size) for size in (64, 8, 32)]
    assert [future.result(WAIT_S) for future in [scheduler.add(key, {}) for key in order]] == [
        str(key) for key in order
    ]
    assert maker.made == order
    scheduler.close()


def test_a_program_that_cannot_be_made_fails_alone() -> None:
    maker = Maker(failing=StepShape(8))
    maker.may_go_on.set()
    scheduler = scheduled(make=maker)
    futures = [scheduler.add(key, {}) for key in (StepShape(8), StepShape(16))]
    assert isinstance(futures[0].exception(WAIT_S), NotImplementedError)
    assert futures[1].result(WAIT_S) == "16 tokens"
    scheduler.close()


def test_no_more_programs_are_made_at_a_time_than_the_limit(maker: Maker) -> None:
    scheduler = scheduled(make=maker, threads=4)
    scheduler.limit(1)
    futures = [scheduler.add(StepShape(size), {}) for size in (8, 16, 32)]
    assert maker.has_begun.wait(WAIT_S)
    maker.may_go_on.set()
    for future in futures:
        future.result(WAIT_S)
    assert maker.most_at_a_time == 1
    assert len(maker.made) == 3
    scheduler.close()


class TimesDecodes(Untimed):
    def times_decodes(self, rows: int) -> bool:
        return True


def test_a_program_waits_for_the_one_that_times_its_products_whatever_becomes_of_that(maker: Maker) -> None:
    scheduler = CompileScheduler(CATALOG, SHAPES, TimesDecodes(), maker, 1)
    maker.may_go_on.set()
    others: dict[Key, Future[Any]] = {("decode", rows): Future() for rows in (8, 64, 128)}
    waiting = [scheduler.add(("burst", rows), others) for rows in (8, 64, 128)]
    assert scheduler.add(StepShape(8), others).result(WAIT_S) == "8 tokens"
    assert maker.made == [StepShape(8)]
    made, failed, cancelled = others.values()
    made.set_result("made")
    failed.set_exception(RuntimeError("not made"))
    cancelled.cancel()
    assert [future.result(WAIT_S) for future in waiting[:2]] == [str(("burst", rows)) for rows in (8, 64)]
    assert waiting[2].cancelled()
    scheduler.close()


def test_closing_cancels_those_that_wait_and_those_that_come_later(maker: Maker) -> None:
    scheduler = CompileScheduler(CATALOG, SHAPES, TimesDecodes(), maker, 1)
    other: Future[Any] = Future()
    under_way, waiting = scheduler.add(StepShape(8), {}), scheduler.add(StepShape(16), {})
    behind = scheduler.add(("burst", 8), {("decode", 8): other})
    assert maker.has_begun.wait(WAIT_S)
    scheduler.close()
    other.set_result("made")
    for future in (waiting, behind, scheduler.add(StepShape(8), {})):
        with pytest.raises(CancelledError):
            future.result(WAIT_S)
    maker.may_go_on.set()
    assert under_way.result(WAIT_S) == "8 tokens"
    assert maker.made == [StepShape(8)]


def test_a_single_sequence_is_decoded_by_a_program_for_one() -> None:
    assert StepShape(1, decodes_only=True) in CATALOG.programs_for_prompt(100)
    on_a_cpu = Catalog(Shapes(64, 32, 32, 512, 512)).programs_for_prompt(100)
    assert [key for key in on_a_cpu if isinstance(key, StepShape)] == [StepShape(128), StepShape(1)]


def test_on_a_gpu_programs_for_prompts_beside_decodes_come_before_all_but_those_for_decodes() -> None:
    soon = [key for key in LATER if isinstance(key, StepShape) and key == StepShape(key.tokens)]
    soon = [key for key in soon if 128 < key.tokens < 1024]
    before = LATER[: LATER.index(soon[-1])]
    assert {key[0] for key in before if not isinstance(key, StepShape)} == {"decode", "burst", "start", "copy"}
    tokens = {key.tokens for key in before if isinstance(key, StepShape)}
    assert tokens < {192, 320, 384, 448, 640, 768, 896}
    # Each halves the widest gap that is left: a step of 513 to 768 tokens is padded to 1,024 before all others are.
    assert [key.tokens for key in soon[:3]] == [768, 384, 640]


def test_every_program_is_in_the_catalog_once_and_of_a_kind_that_is_described() -> None:
    assert set(KEYS) >= {*CATALOG.first, *CATALOG.early, *SHAPES.ladder.all()}
    assert len(set(KEYS)) == len(KEYS)
    assert {key[0] for key in KEYS if not isinstance(key, StepShape)} <= KINDS.keys()
    assert all(kind.purpose for kind in KINDS.values())


def test_on_a_cpu_the_order_is_that_of_sizes() -> None:
    catalog = Catalog(ON_CPU)
    count = len(catalog.first)
    assert catalog.keys[:count] == catalog.first
    assert catalog.keys[count : count + len(catalog.early)] == catalog.early
    rest = catalog.keys[count + len(catalog.early) :]
    sizes = [key.tokens for key in rest if isinstance(key, StepShape) and not key.scores and not key.fresh_sequences]
    assert all(low < high for low, high in pairwise(sizes))
    assert len(sizes) > 5


def test_pages_that_other_engines_read_leave_the_device_by_programs_of_the_sizes_that_are_read() -> None:
    saves = [key[1] for key in Catalog(SHAPES, ("split", "place")).first if key[0] == "save"]
    assert saves == [1, 16]


def test_a_server_makes_the_program_that_its_steps_miss_next_and_cuts_prompts_for_those_it_has() -> None:
    first = {*CATALOG.first}
    compiler = RecordedCompiler(SHAPES, lambda key: key not in first)
    programs = Programs(compiler, 1)
    for _ in programs.compile_all():
        if programs.num_made_of_needed[0] == len(first):
            break
    programs.scheduler.ran |= first
    assert programs.step_sizes == ()
    programs.begin_serving()
    programs.advance()
    assert programs.step_sizes == (256, 512, 1024, 2048, 8448)
    assert compiler.is_held.wait(WAIT_S)
    missed = StepShape(7168)  # one of the last
    assert programs.forward(StepShape(7000), 220)[0] == StepShape(8448)
    compiler.may_go_on.set()
    for _ in programs.compile_all():
        pass
    later = compiler.made[len(first) :]
    assert later[1] == missed
    assert [later[0], *later[2:]] == [key for key in LATER if key != missed]
    programs.advance()
    assert programs.step_sizes == SHAPES.ladder.cut_sizes
    programs.close()
