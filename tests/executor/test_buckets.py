"""Any plan a scheduler can emit has its buckets, and is laid out in them completely."""

from typing import NamedTuple

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from quire.core.plan import Chunk, Kind
from quire.executor.batch import Inputs, Packer, num_groups, num_updates, sampled_rows, sizes, split
from quire.executor.buckets import GROUP_SIZE, Bucket, Buckets

DECODE = 1


class Case(NamedTuple):
    """A plan: the start and length of each chunk, whether its slot begins with it, whether its prompt is scored."""

    max_rows: int
    max_prefill_tokens: int
    page_size: int
    min_rows: int
    chunks: list[tuple[int, int, bool, bool]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    max_rows = draw(st.integers(1, 40))
    max_prefill_tokens = draw(st.integers(1, 400))
    page_size = draw(st.integers(1, 70))
    chunks: list[tuple[int, int, bool, bool]] = []
    room = max_prefill_tokens
    for _ in range(draw(st.integers(1, max_rows))):
        start = draw(st.integers(0, 200))
        if room and draw(st.booleans()):
            length = draw(st.integers(1, room) | st.integers(1, min(room, 5)))
            room -= length
            # A slot that begins with cached pages begins at the end of a page.
            starts = draw(st.booleans())
            chunks.append((start // page_size * page_size if starts else start, length, starts, draw(st.booleans())))
        else:
            chunks.append((start, DECODE, False, False))
    return Case(max_rows, max_prefill_tokens, page_size, draw(st.sampled_from([1, 8])), chunks)


def chunks_of(case: Case) -> tuple[Chunk, ...]:
    chunks, page = [], 1
    for slot, (start, length, starts, _) in enumerate(case.chunks):
        there = 0 if starts else -(-start // case.page_size)
        count = -(-(start + length) // case.page_size) - there
        new_pages = (tuple(range(page, page + count)),) if count else ()
        chunks.append(Chunk(slot, 0, 0, slot, Kind.PREFILL, start, length, new_pages, samples=slot % 3 > 0))
        page += count
    return tuple(chunks)


@given(case=cases())
@example(Case(4, 400, 16, 1, [(0, 400, True, True)]))  # a long prompt, scored in one chunk
@example(Case(40, 400, 16, 1, [(0, 2, True, False)] * 40))  # more groups than the tokens would need
def test_every_plan_runs_whole_in_buckets_that_exist(case: Case) -> None:
    buckets = Buckets(case.max_rows, case.max_prefill_tokens, case.min_rows)
    chunks = chunks_of(case)
    scored = {index for index, chunk in enumerate(case.chunks) if chunk[3]}
    launches = split(chunks, scored, buckets.max_groups, buckets.max_scored_groups)
    assert sorted(index for launch in launches for index in (*launch.rows, *launch.fills)) == list(range(len(chunks)))
    packer = Packer(case.max_rows, case.page_size)
    started = {slot for slot, chunk in enumerate(case.chunks) if chunk[2]}
    for chunk in chunks:
        in_table = len(*chunk.new_pages) if chunk.slot in started else -(-chunk.start // case.page_size)
        packer.start(chunk.slot, in_table)
    for launch in launches:
        assert launch.scores == any(index in scored for index in (*launch.rows, *launch.fills))
        bucket = buckets.covering(Bucket(len(launch.rows), launch.num_groups, launch.scores), buckets.all())
        assert bucket is not None
        assert bucket.num_samples in buckets.sample_sizes()
        packed = packer.pack(launch, chunks, started, bucket)
        ends = np.cumsum(sizes(bucket, case.page_size))
        assert len(packed) == ends[-1]
        inputs = Inputs(*np.split(packed, ends[:-1]))  # type: ignore[arg-type]
        assert len(inputs.pages) == num_updates(bucket, case.page_size)
        check_positions(inputs, [chunks[index] for index in (*launch.rows, *launch.fills)], case.max_rows)
        check_pages(inputs, [chunks[index] for index in (*launch.rows, *launch.fills)], case, started)
        rows = sampled_rows(chunks, launch, bucket)
        assert len({row for row, _ in rows}) == len(rows) == len(launch.rows) + len(launch.fills)
        assert all(row < bucket.num_samples for row, _ in rows)


def check_positions(inputs: Inputs, chunks: list[Chunk], padding: int) -> None:
    """Rows and groups hold every position of the chunks once, and otherwise padding."""
    given = [(int(s), int(p)) for s, p in zip(inputs.row_slots, inputs.row_positions, strict=True) if p >= 0]
    groups = zip(inputs.group_slots, inputs.group_starts, inputs.group_lengths, strict=True)
    for slot, start, length in groups:
        assert length <= GROUP_SIZE
        assert length or slot == padding
        given += [(int(slot), int(start) + offset) for offset in range(length)]
    wanted = [(chunk.slot, chunk.start + offset) for chunk in chunks for offset in range(chunk.length)]
    assert sorted(given) == sorted(wanted)


def check_pages(inputs: Inputs, chunks: list[Chunk], case: Case, started: set[int]) -> None:
    """Every new page is put where its positions will look for it; those of slots that begin are there already."""
    given = {
        (int(slot), int(position) // case.page_size): int(page)
        for slot, position, page in zip(inputs.row_slots, inputs.row_positions, inputs.row_pages, strict=True)
        if page
    }
    updates = zip(inputs.page_slots, inputs.page_indices, inputs.pages, strict=True)
    given |= {(int(slot), int(index)): int(page) for slot, index, page in updates if slot != case.max_rows}
    wanted = {}
    for chunk in chunks:
        if chunk.slot not in started:
            first = -(-chunk.start // case.page_size)
            wanted |= {(chunk.slot, first + number): page for number, page in enumerate(*chunk.new_pages or ((),))}
    assert given == wanted


@given(case=cases(), ready=st.integers(3, 40))
def test_the_first_buckets_cover_whatever_the_others_would(case: Case, ready: int) -> None:
    """Serving begins with these; the rest only make it cheaper."""
    buckets = Buckets(case.max_rows, case.max_prefill_tokens, case.min_rows)
    scored = {index for index, chunk in enumerate(case.chunks) if chunk[3]}
    for launch in split(chunks_of(case), scored, buckets.max_groups, buckets.max_scored_groups):
        size = Bucket(len(launch.rows), launch.num_groups, launch.scores)
        early = buckets.covering(size, buckets.all()[:ready])
        late = buckets.covering(size, buckets.all())
        assert early is not None
        assert late is not None
        assert late.num_tokens <= early.num_tokens


def test_a_decode_alone_runs_in_the_smallest_bucket_that_does_only_that() -> None:
    buckets = Buckets(max_rows=64, max_prefill_tokens=512)
    assert [buckets.covering(Bucket(rows, 0), buckets.all()) for rows in (1, 3, 33, 64)] == [
        Bucket(1, 0),
        Bucket(4, 0),
        Bucket(48, 0),
        Bucket(64, 0),
    ]


def test_long_prompts_alone_have_their_own_buckets_and_nothing_else_runs_in_them() -> None:
    buckets = Buckets(max_rows=64, max_prefill_tokens=4096, alone_from=64, most_alone=8)
    chosen = {alone: buckets.covering(Bucket(0, 64, alone=alone), buckets.all()) for alone in (0, 1, 2, 8, 9)}
    assert chosen == {alone: Bucket(0, 64, alone=most) for alone, most in {0: 0, 1: 1, 2: 8, 8: 8, 9: 0}.items()}
    short = buckets.covering(Bucket(0, 3, alone=1), buckets.all())
    assert short == Bucket(0, 4)


def test_there_is_no_bucket_for_more_groups_than_prompts_alone_can_have() -> None:
    buckets = Buckets(max_rows=64, max_prefill_tokens=4096, alone_from=64, most_alone=8)
    longest = {most: max(bucket.groups for bucket in buckets.all() if bucket.alone == most) for most in (1, 8)}
    assert longest == {1: 128, 8: 136}
    # Each of eight prompts may begin a group that it does not fill.
    assert buckets.covering(Bucket(0, 128 + 7, alone=8), buckets.all()) == Bucket(0, 136, alone=8)


def test_a_chunk_has_the_groups_its_tokens_need() -> None:
    lengths = {1: 1, GROUP_SIZE: 1, GROUP_SIZE + 1: 2, 5 * GROUP_SIZE: 5}
    chunks = [Chunk(0, 0, 0, 0, Kind.DECODE, 3, length, (), True) for length in lengths]
    assert [num_groups(chunk) for chunk in chunks] == list(lengths.values())
