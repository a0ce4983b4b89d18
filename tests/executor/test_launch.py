"""Any plan that a scheduler can make fits a shape that exists, and is laid out in it completely."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from quire.core.plan import Chunk, Kind, StepPlan
from quire.executor.launch import FROM_THE_LAST, Inputs, Launch, Packer, fields, launches_of, num_single
from quire.executor.programs.kinds import Key
from quire.executor.programs.ladder import FINE_FROM, Ladder, StepShape
from quire.executor.programs.table import ProgramTable
from quire.executor.sample.sampler import Features
from quire.executor.shapes import Shapes
from quire.ops.pages import TILE
from tests.executor.sampling import slot_start
from tests.executor.workload import GREEDY
from tests.fake_executor import plan_of

PLAIN = Features(*[False] * 5)


class Case(NamedTuple):
    """A plan: the start and length of each chunk, whether its slot begins with it, whether its prompt is scored."""

    shapes: Shapes
    chunks: list[tuple[int, int, bool, bool]]


def shapes_of(num_slots: int, max_prefill_tokens: int, page_size: int = 16, **others: object) -> Shapes:
    return Shapes(400, page_size, num_slots, max_prefill_tokens, 4096, **others)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shapes = shapes_of(
        draw(st.integers(1, 40)),
        draw(st.integers(1, 400)),
        draw(st.integers(1, 70)),
        num_groups=draw(st.integers(1, 3)),
        min_tokens=draw(st.sampled_from([1, 8])),
        is_fine=draw(st.booleans()),
        specialised=draw(st.booleans()),
        max_fresh_sequences=draw(st.sampled_from([0, 1, 4])),
        fresh_from=64,
    )
    chunks: list[tuple[int, int, bool, bool]] = []
    left = shapes.max_prefill_tokens
    for _ in range(draw(st.integers(1, shapes.num_slots))):
        start = draw(st.integers(0, 200))
        if left and draw(st.booleans()):
            length = draw(st.integers(1, left) | st.integers(1, min(left, 5)))
            left -= length
            # A slot that begins with cached pages begins at the end of a page.
            starts = draw(st.booleans())
            first = start // shapes.page_size * shapes.page_size if starts else start
            chunks.append((first if draw(st.booleans()) else 0, length, starts, draw(st.booleans())))
        else:
            chunks.append((start, 1, False, False))
    return Case(shapes, chunks)


def chunks_of(case: Case) -> tuple[Chunk, ...]:
    chunks, page, size = [], 1, case.shapes.page_size
    for slot, (start, length, starts, _) in enumerate(case.chunks):
        there = 0 if starts else -(-start // size)
        count = -(-(start + length) // size) - there
        groups = [range(page + count * group, page + count * (group + 1)) for group in range(case.shapes.num_groups)]
        new_pages = tuple(map(tuple, groups)) if count else ()
        kind = Kind.DECODE if length == 1 and not starts and slot % 2 else Kind.PREFILL
        chunks.append(Chunk(slot, 0, 0, slot, kind, start, length, new_pages, samples=slot % 3 > 0))
        page += count * case.shapes.num_groups
    return tuple(sorted(chunks, key=lambda chunk: chunk.kind is Kind.PREFILL))


def plan_for(case: Case) -> tuple[StepPlan, set[int]]:
    """A plan of a case, and the chunks whose prompts are scored."""
    chunks = chunks_of(case)
    started = tuple(slot_start(GREEDY, slot=slot) for slot, chunk in enumerate(case.chunks) if chunk[2])
    scored = {index for index, chunk in enumerate(chunks) if chunk.kind is Kind.PREFILL and case.chunks[chunk.slot][3]}
    return plan_of(1, chunks, started=started), scored


@given(case=cases())
@example(Case(shapes_of(4, 400), [(0, 400, True, True)]))  # a long prompt, scored in one chunk
@example(Case(shapes_of(40, 80), [(0, 2, True, False)] * 40))  # as many short tiles as there are slots
def test_every_plan_runs_whole_in_shapes_that_exist(case: Case) -> None:
    shapes, (plan, scored) = case.shapes, plan_for(case)
    chunks = plan.chunks
    launches = launches_of(plan, shapes, scored)
    assert sorted(index for launch in launches for index in launch.indices) == list(range(len(chunks)))
    packer = Packer(shapes)
    started = {start.slot for start in plan.started}
    for chunk in chunks:
        there = -(-chunk.start // shapes.page_size)
        packer.start(chunk.slot, chunk.new_pages if chunk.slot in started else ((0,) * there,) * shapes.num_groups)
    table = ProgramTable(shapes.ladder)
    for launch in launches:
        assert launch.scores == any(index in scored for index in launch.indices)
        shape = table.forward(launch.shape, launch.num_tiles)
        assert shape in shapes.ladder.all()
        inputs = fields(packer.pack(launch, shape), shape, shapes)
        those = [chunks[index] for index in launch.indices]
        check_positions(inputs, those, shapes)
        if not shape.decodes_only:
            check_tiles(inputs, launch, num_single(shape, shapes), shapes)
        check_pages(inputs, those, shapes, started)
        assert sorted(launch.sampled) == sorted(index for index in launch.indices if chunks[index].samples)
        assert not any(chunks[index].samples for index in launch.unsampled)
        for row, index in enumerate([*launch.sampled, *launch.unsampled]):
            end = inputs.ends[row]
            chunk = chunks[index]
            assert (inputs.slots[end], inputs.positions[end]) == (chunk.slot, chunk.start + chunk.length - 1)
        count = len(launch.sampled)
        assert table.sample(count, PLAIN)[1] >= count


def check_positions(inputs: Inputs, chunks: list[Chunk], shapes: Shapes) -> None:
    """The tokens are the positions of the chunks, one after the other, and then padding."""
    given = list(zip(inputs.slots.tolist(), inputs.positions.tolist(), strict=True))
    wanted = [(chunk.slot, chunk.start + offset) for chunk in chunks for offset in range(chunk.length)]
    assert given == wanted + [(shapes.num_slots, -1)] * (len(given) - len(wanted))


def check_tiles(inputs: Inputs, launch: Launch, single: int, shapes: Shapes) -> None:
    """Every token is in one tile, which says where it stands; single ones are the first tokens."""
    arrays = (inputs.tile_slots, inputs.tile_starts, inputs.tile_lengths, inputs.tile_offsets)
    tiles = list(zip(*(array.tolist() for array in arrays), strict=True))
    covered = []
    for number, (slot, start, length, offset) in enumerate(tiles):
        assert length or slot == shapes.num_slots
        assert length <= (1 if number < single else TILE)
        assert offset == number or number >= single or not length
        for at in range(length):
            assert (inputs.slots[offset + at], inputs.positions[offset + at]) == (slot, start + at)
            covered.append(offset + at)
    assert sorted(covered) == list(range(launch.num_tokens))
    assert sum(length > 0 for _, _, length, _ in tiles[:single]) == launch.num_rows


def check_pages(inputs: Inputs, chunks: list[Chunk], shapes: Shapes, started: set[int]) -> None:
    """Every new page is put where its positions will look for it; those of slots that begin are there already."""
    updates = zip(inputs.page_slots, inputs.page_groups, inputs.page_indices, inputs.pages, strict=True)
    given = {(int(s), int(g), int(index)): int(page) for s, g, index, page in updates if s != shapes.num_slots}
    wanted = {}
    for chunk in chunks:
        if chunk.slot not in started:
            first = -(-chunk.start // shapes.page_size)
            for group, pages in enumerate(chunk.new_pages):
                wanted |= {(chunk.slot, group, first + number): page for number, page in enumerate(pages)}
    assert given == wanted


@given(case=cases(), ready=st.integers(0, 40))
def test_the_first_shapes_cover_whatever_the_others_would(case: Case, ready: int) -> None:
    """Serving begins with these; the rest only make it cheaper."""
    ladder = case.shapes.ladder
    plan, scored = plan_for(case)
    among = [*ladder.first(), *ladder.all()[:ready]]
    for launch in launches_of(plan, case.shapes, scored):
        shape = ladder.choose(launch.shape, launch.num_tiles, among)
        assert shape is not None
        assert shape.tokens >= launch.num_tokens
        smallest = ladder.choose(launch.shape, launch.num_tiles, ladder.all())
        assert smallest is not None
        assert smallest.tokens <= shape.tokens or shape.decodes_only or smallest.fresh_sequences


def test_a_choice_depends_on_the_table_alone() -> None:
    ladder = Ladder(256, 8192, min_tokens=8, is_fine=True, has_decodes=True, max_fresh_sequences=8)
    keys: list[Key] = [*ladder.all(), ("decode", 64), ("burst", 64), ("plain", 64), ("any", 64), ("any", 256)]
    for order in (keys, keys[::-1]):
        table = ProgramTable(ladder, order)
        assert table.forward(StepShape(300), 3) == StepShape(320)
        assert table.forward(StepShape(60, decodes_only=True), 0) == StepShape(64, decodes_only=True)
        assert table.forward(StepShape(4000, fresh_sequences=3), 150) == StepShape(4096, fresh_sequences=8)
        assert table.forward(StepShape(2600, fresh_sequences=1), 150) == StepShape(3072, fresh_sequences=1)
        assert table.forward(StepShape(3100), 150) == StepShape(3584)
        assert table.decode(60, 4, most=4) == (StepShape(64, decodes_only=True), ("burst", 64))
        assert table.decode(60, 3, most=4) is None
        assert table.decode(200, 1, most=4) is None
        assert table.decode(60, 1, most=4, shares=True) == (StepShape(64, decodes_only=True), ("decode", 64))
        assert table.sample(60, PLAIN) == ("plain", 64)
        assert table.sample(60, PLAIN._replace(logprobs=True)) == ("any", 64)
        assert table.sample(65, PLAIN) == ("any", 256)


def test_decodes_run_in_one_program_before_there_are_two_for_as_many_rows() -> None:
    ladder = Ladder(256, 8192, min_tokens=8, is_fine=True, has_decodes=True)
    first: list[Key] = [*ladder.first(), ("any", 256), *(("decode", rows) for rows in (8, 16, 32, 48, 64))]
    table = ProgramTable(ladder, first)
    assert table.forward(StepShape(20, decodes_only=True), 0) == StepShape(256, decodes_only=True)
    assert table.decode(20, 1, most=1) == (StepShape(32, decodes_only=True), ("decode", 32))
    assert table.decode(65, 1, most=1) is None
    fewer = ProgramTable(ladder, [*ladder.all(), ("any", 256), ("decode", 256)])
    assert fewer.decode(20, 1, most=1) is None  # two programs for 32 rows take less time
    assert fewer.decode(120, 1, most=1) == (StepShape(256, decodes_only=True), ("decode", 256))


def test_a_decode_that_is_alone_runs_without_padding() -> None:
    ladder = Ladder(256, 8192, min_tokens=8, is_fine=True, has_decodes=True)
    table = ProgramTable(ladder, [*ladder.all(), ("any", 256), ("decode", 1), ("decode", 8), ("burst", 8)])
    assert table.decode(1, 1, most=4) == (StepShape(1, decodes_only=True), ("decode", 1))
    assert table.decode(2, 1, most=4) == (StepShape(8, decodes_only=True), ("decode", 8))
    assert table.decode(1, 4, most=4) == (StepShape(8, decodes_only=True), ("burst", 8))  # four steps at once
    reproducible = Ladder(256, 8192, min_tokens=8, is_fine=True, has_decodes=True, shares=True, shares_in_all=True)
    assert reproducible.decodes[0].tokens == 8


def test_decodes_that_share_pages_run_where_these_are_read_together() -> None:
    ladder = Ladder(256, 8192, min_tokens=8, is_fine=True, has_decodes=True, shares=True)
    assert [shape.tokens for shape in ladder.shared] == [64, 128, 256]
    shared = [("shared", shape.tokens) for shape in ladder.shared]
    table = ProgramTable(ladder, [*ladder.all(), *shared, ("decode", 96), ("burst", 96)])
    assert table.decode(70, 1, most=4, shares=True) == (StepShape(128, decodes_only=True, shares=True), shared[1])
    assert table.decode(70, 4, most=4, shares=True) is None  # one after the other
    assert table.decode(70, 4, most=4) == (StepShape(96, decodes_only=True), ("burst", 96))
    # What else decodes may run in has room for shared pages as steps with prompts have, where they are long enough.
    assert table.forward(StepShape(70, decodes_only=True, shares=True), 0) == StepShape(256)
    assert table.forward(StepShape(70, shares=True), 2) == StepShape(256)
    assert table.forward(StepShape(300, shares=True), 2) == StepShape(320)
    assert table.forward(StepShape(70, scores=True, shares=True), 2).scores
    few = ProgramTable(Ladder(32, 64, has_decodes=True, shares=True))
    assert few.forward(StepShape(20, decodes_only=True, shares=True), 0) == StepShape(32, decodes_only=True)


def test_programs_that_are_compiled_on_use_are_the_smallest_for_their_plans() -> None:
    """A large one that is there already does not serve a small plan, before there are enough for every plan."""
    ladder = Ladder(32, 512)
    assert ProgramTable(ladder, [StepShape(512)]).forward(StepShape(8, decodes_only=True), 0) == StepShape(8)
    enough = ProgramTable(ladder, ladder.first())
    assert enough.forward(StepShape(8, decodes_only=True), 0) == StepShape(32)


def test_slots_and_pages_are_begun_and_copied_one_by_one_until_there_is_a_program_for_more() -> None:
    ladder = Ladder(32, 512)
    enough: list[Key] = [*ladder.first(), ("start", 1), ("copy", 1)]
    table = ProgramTable(ladder, enough)
    assert (table.start_size(5), table.copy_size(3)) == (1, 1)
    table = ProgramTable(ladder, [*enough, ("start", 8), ("copy", 16)])
    assert (table.start_size(1), table.start_size(5), table.start_size(20)) == (1, 8, 8)
    assert (table.copy_size(1), table.copy_size(3)) == (1, 16)
    # Where programs are compiled on use, each is the one for its plan.
    assert (ProgramTable(ladder).start_size(5), ProgramTable(ladder, [("copy", 1)]).copy_size(3)) == (8, 16)


def test_a_fine_ladder_has_close_steps_of_many_decodes() -> None:
    def decodes(max_rows: int, **how: bool) -> list[int]:
        return [shape.tokens for shape in Ladder(max_rows, 8192, min_tokens=8, has_decodes=True, **how).decodes]

    assert decodes(256, is_fine=True) == [1, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    assert decodes(256) == [8, 16, 32, 48, 64, 96, 128, 192, 256]
    assert decodes(200, is_fine=True) == [1, 8, 16, 32, 48, 64, 96, 128, 160, 200]
    assert decodes(140, is_fine=True) == [1, 8, 16, 32, 48, 64, 96, 140]
    assert decodes(40, is_fine=True) == [1, 8, 16, 40]


def test_a_fine_ladder_wastes_a_fifth_at_most_and_a_coarse_one_a_third() -> None:
    for rows, is_fine, first, most in ((256, True, 0, 1 / 5), (700, True, 0, 1 / 5), (256, False, 16, 1 / 3)):
        ladder, end = Ladder(rows, 8192, is_fine=is_fine), 9000
        sizes = sorted(shape.tokens for shape in ladder.all() if shape == StepShape(shape.tokens))
        assert sizes[-1] == ladder.max_tokens
        steps = [(low, high) for low, high in pairwise(sizes) if max(first, FINE_FROM * is_fine) <= low < end]
        assert steps
        assert all(1 - (low + 1) / high <= most for low, high in steps)


def test_a_ladder_is_sparse_where_padding_takes_no_time() -> None:
    ladder = Ladder(32, 512, skips_padding=True)
    sizes = [shape.tokens for shape in ladder.all() if shape == StepShape(shape.tokens)]
    assert sorted(sizes) == [1, 4, 16, 64, 128, 256, 512, 544]
    assert ladder.sample_sizes == Ladder(32, 512).sample_sizes  # little of sampling skips padding
    assert ladder.padded_sizes == ()
    assert Ladder(4, 32, skips_padding=True).sample_sizes == [1, 2, 4]
    for rows in range(1, 40):  # there is always one for all rows
        assert Ladder(rows, 32, skips_padding=True).sample_sizes[-1] == rows
    small = [shape.tokens for shape in Ladder(4, 32, skips_padding=True).all() if not shape.scores]
    assert sorted(small) == [1, 4, 16, 32, 36]


def test_programs_are_few_enough_to_compile_at_a_start() -> None:
    """A default CPU server compiles the first before it serves and the rest behind the first requests."""
    ladder = Ladder(32, 512, skips_padding=True)
    assert len(ladder.first()) == 3
    assert len(ladder.all()) <= 11
    assert len(Ladder(32, 512).all()) <= 20
    assert len(Ladder(256, 8192, min_tokens=8, is_fine=True, has_decodes=True, max_fresh_sequences=8).all()) <= 60


def test_a_chunk_has_the_tiles_its_tokens_need() -> None:
    lengths = {2: 1, TILE: 1, TILE + 1: 2, 5 * TILE: 5}
    for length, num_tiles in lengths.items():
        plan = plan_of(1, [Chunk(0, 0, 0, 0, Kind.PREFILL, 3, length, (), True)])
        (launch,) = launches_of(plan, shapes_of(1, 5 * TILE))
        assert launch.num_tiles == num_tiles


def test_the_tokens_of_a_burst_that_runs_in_steps_follow_each_other() -> None:
    shapes = shapes_of(4, 32)
    lengths = {2: 3, 1: 2, 3: 1}  # by slot
    chunks = [Chunk(slot, 0, 0, slot, Kind.DECODE, 10 - slot, length, (), True) for slot, length in lengths.items()]
    (launch,) = launches_of(plan_of(1, chunks, burst=3), shapes)
    expected = [[[1, 2, 3, 4], [9, 8, 7, 0]], [[1, 2, 4, 4], [10, 9, 0, 0]], [[2, 4, 4, 4], [10, 0, 0, 0]]]
    for slots, positions in expected:
        packed = Packer(shapes).pack_samples(launch, 4, PLAIN)
        counts = [int(slot < 4) for slot in slots]
        np.testing.assert_array_equal(packed[:12].reshape(3, 4), [slots, positions, counts])
        launch = launch.next_of_burst()


def test_a_step_with_guesses_samples_after_each_of_them() -> None:
    """Where they begin the device knows; before what ends in the step come those that go on."""
    shapes = shapes_of(4, 32, guesses=3, step_guesses=6)
    chunks = [
        Chunk(0, 0, 0, 2, Kind.DECODE, 7, 1, (), True),
        Chunk(1, 0, 0, 1, Kind.VERIFY, 9, 3, (), True),
        Chunk(2, 0, 0, 0, Kind.PREFILL, 4, 5, (), False),
        Chunk(3, 0, 0, 3, Kind.PREFILL, 6, 2, (), True),
    ]
    (launch,) = launches_of(plan_of(1, chunks), shapes)
    assert (launch.sampled, launch.unsampled) == ([0, 1, 1, 1, 3], [2])
    packer = Packer(shapes)
    packed = packer.pack_samples(launch, 6, PLAIN)
    last = FROM_THE_LAST
    expected = [[2, 1, 1, 1, 3, 4], [last, last, last + 1, last + 2, 7, 0], [1] * 5 + [0], [0, 0, 1, 2, 0, 0]]
    np.testing.assert_array_equal(packed[:24].reshape(4, 6), expected)
    shape = StepShape(16)
    inputs = fields(packer.pack(launch, shape), shape, shapes)
    ends = [(int(inputs.slots[end]), int(inputs.positions[end])) for end in inputs.ends[:6]]
    assert ends == [(2, last), (1, last), (1, last + 1), (1, last + 2), (3, 7), (0, 8)]
