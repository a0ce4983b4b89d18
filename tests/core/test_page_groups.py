"""Layers that read the last positions alone hold pages for those alone."""

import pytest

from quire.errors import PromptTooLong
from quire.reach import ChunkReach
from tests.core.harness import GREEDY, Harness, limits, request
from tests.fake_executor import expected_tokens


def held_by_group(harness: Harness) -> list[int]:
    """Pages of all running sequences."""
    running = list(harness.scheduler._running)
    return [sum(page > 0 for sequence in running for page in sequence.tables[group]) for group in range(2)]


def test_pages_behind_a_window_are_given_back_while_a_sequence_decodes():
    harness = Harness(limits(page_groups=(None, 8), num_pages=40))
    asked = request(1, prompt=(1, 2, 3), max_tokens=50)
    harness.add(asked)
    held = []
    while harness.scheduler.num_requests:
        held.append(held_by_group(harness))
        harness.step()
    assert max(full for full, _ in held) == 13
    assert max(window for _, window in held) == 3, "8 positions touch no more pages of 4"
    assert harness.tokens[1, 0] == expected_tokens(asked)


@pytest.mark.parametrize("window", [5, 6, 7, 8])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_pages_that_a_window_still_reads_are_kept(window, lookahead):
    harness = Harness(limits(page_groups=(None, window), num_pages=60, max_batch_prefill_tokens=7), lookahead)
    harness.add(request(1, prompt=tuple(range(18)), max_tokens=30))
    while harness.scheduler.num_requests:
        harness.step()
        for sequence in harness.scheduler._running:
            first_read = max(0, sequence.num_computed - window + 1)
            assert all(sequence.tables[1][first_read // 4 :])


def test_pages_behind_a_window_are_given_back_while_a_prompt_is_computed():
    harness = Harness(limits(page_groups=(None, 8), num_pages=40, max_batch_prefill_tokens=8))
    asked = request(1, prompt=tuple(range(40)), max_tokens=2)
    harness.add(asked)
    for _ in range(4):
        harness.step()
    assert held_by_group(harness) == [8, 2]
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)


def test_a_windowed_model_runs_more_sequences_in_the_same_pages():
    running = {}
    for groups in ((None, None), (None, 8)):
        harness = Harness(limits(page_groups=groups, num_pages=81, max_batch_size=8, max_batch_prefill_tokens=8))
        for request_id in range(8):
            harness.add(request(request_id, prompt=(request_id, *range(40)), max_tokens=20))
        most = 0
        while harness.scheduler.num_requests:
            harness.step()
            most = max(most, harness.scheduler.num_running)
        running[groups] = most
    assert running[None, 8] > running[None, None]


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("num_pages", [4, 6])
def test_a_sequence_longer_than_the_pages_runs_where_all_layers_have_windows(num_pages, lookahead):
    """It waits for results that give pages back, rather than begin again."""
    harness = Harness(limits(page_groups=(8,), num_pages=num_pages, max_sequence_tokens=64), lookahead)
    asked = request(1, prompt=tuple(range(30)), max_tokens=30)
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)
    assert harness.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(("num_pages", "fits"), [(20, True), (19, False)])
def test_what_fits_is_counted_over_all_groups(num_pages, fits):
    """16 pages of 4 for 64 tokens in the full group, 3 that 8 positions can touch in the other."""
    harness = Harness(limits(page_groups=(None, 8), num_pages=num_pages))
    asked = request(1, prompt=tuple(range(34)), max_tokens=30)
    if fits:
        harness.add(asked)
        harness.run()
        assert harness.tokens[1, 0] == expected_tokens(asked)
    else:
        with pytest.raises(PromptTooLong, match="they take 19 pages, the cache holds 18"):
            harness.add(asked)


def test_the_next_turn_reuses_the_full_pages_and_the_last_window():
    harness = Harness(limits(page_groups=(None, 8), num_pages=60))
    first = request(1, prompt=tuple(range(20)), max_tokens=13, sampling=GREEDY)
    harness.add(first)
    harness.run()
    told = first.prompt + tuple(expected_tokens(first))
    second = request(2, prompt=(*told, 40, 41), max_tokens=4)
    harness.add(second)
    plan = harness.plan()
    assert plan.chunks[0].start == 32
    full, window = plan.chunks[0].new_pages
    assert all(full)
    assert [page > 0 for page in window] == [False] * 6 + [True] * 3, "2 pages of the window, and the next"
    harness.run()
    assert harness.tokens[2, 0] == expected_tokens(second)


def test_an_early_part_of_a_long_prompt_is_reused_for_as_long_as_its_pages_are_not_evicted():
    harness = Harness(limits(page_groups=(None, 8), num_pages=60))
    harness.add(request(1, prompt=tuple(range(40)), max_tokens=1))
    harness.run()
    asked = request(2, prompt=(*range(20), 45), max_tokens=4)
    harness.add(asked)
    assert harness.plan().chunks[0].start == 20
    harness.run()
    assert harness.tokens[2, 0] == expected_tokens(asked)


def test_an_early_part_of_a_long_answer_is_reused_too():
    harness = Harness(limits(page_groups=(None, 8), num_pages=60))
    first = request(1, prompt=(1, 2, 3, 4), max_tokens=40)
    harness.add(first)
    harness.run()
    told = first.prompt + tuple(expected_tokens(first))
    harness.add(request(2, prompt=(*told[:20], 45), max_tokens=2))
    assert harness.plan().chunks[0].start == 20


def test_a_burst_begins_a_page_in_every_group():
    harness = Harness(limits(page_groups=(None, 8), max_burst=4))
    asked = request(1, prompt=(1, 2, 3), max_tokens=20)
    harness.add(asked)
    harness.step()
    plan = harness.plan()
    assert plan.burst == 4
    assert [len(pages) for pages in plan.chunks[0].new_pages] == [1, 1]
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)


def test_pages_of_a_chunk_are_given_back_when_the_next_one_begins():
    """Chunks of 8 are two pages of 4: of the one that has begun all pages stay, and of those before it none."""
    harness = Harness(limits(page_groups=(None, ChunkReach(8)), num_pages=40))
    asked = request(1, prompt=(1, 2, 3), max_tokens=50)
    harness.add(asked)
    first_held = {}
    while harness.scheduler.num_requests:
        harness.step()
        for sequence in harness.scheduler._running:
            first_held[sequence.num_computed] = sequence.first_held[1]
    # Pages are given back when the sequence takes the next one.
    assert [first_held[position] for position in (4, 9, 15, 17, 23, 25, 49)] == [0, 2, 2, 4, 4, 6, 12]
    assert harness.tokens[1, 0] == expected_tokens(asked)


@pytest.mark.parametrize("chunk", [3, 5, 8, 10])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_pages_that_a_chunk_still_reads_are_kept(chunk, lookahead):
    harness = Harness(
        limits(page_groups=(None, ChunkReach(chunk)), num_pages=60, max_batch_prefill_tokens=7), lookahead
    )
    harness.add(request(1, prompt=tuple(range(18)), max_tokens=30))
    while harness.scheduler.num_requests:
        harness.step()
        for sequence in harness.scheduler._running:
            first_read = sequence.num_computed // chunk * chunk
            assert all(sequence.tables[1][first_read // 4 :])


@pytest.mark.parametrize("lookahead", [0, 2])
def test_a_sequence_longer_than_the_pages_runs_where_all_layers_read_chunks(lookahead):
    harness = Harness(limits(page_groups=(ChunkReach(8),), num_pages=6, max_sequence_tokens=64), lookahead)
    asked = request(1, prompt=tuple(range(30)), max_tokens=30)
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)
    assert harness.scheduler.counters.preemptions == 0


def test_the_next_turn_reuses_the_full_pages_and_the_chunk_that_has_begun():
    harness = Harness(limits(page_groups=(None, ChunkReach(24)), num_pages=60))
    first = request(1, prompt=tuple(range(20)), max_tokens=13, sampling=GREEDY)
    harness.add(first)
    harness.run()
    told = first.prompt + tuple(expected_tokens(first))
    second = request(2, prompt=(*told, 40, 41), max_tokens=4)
    harness.add(second)
    plan = harness.plan()
    assert plan.chunks[0].start == 32
    assert [page > 0 for page in plan.chunks[0].new_pages[1]] == [False] * 6 + [True] * 3, "from position 24 on"
    harness.run()
    assert harness.tokens[2, 0] == expected_tokens(second)


@pytest.mark.parametrize("groups", [(), (1,), (None, 0), (None, ChunkReach(1))])
def test_a_window_or_chunk_below_two_positions_is_refused(groups):
    with pytest.raises(ValueError, match="page_groups is"):
        limits(page_groups=groups)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda tables: tables[1].__setitem__(6, 0), "position 24 of group 1 is read from page 0"),
        (lambda tables: tables[1].__setitem__(6, tables[0][6]), "which holds position 24 of group 0"),
        (lambda tables: tables[0].__setitem__(0, tables[0][1]), "which holds position 4 of group 0"),
    ],
)
def test_the_fake_executor_sees_a_page_that_is_missing_or_another(harm, message):
    harness = Harness(limits(page_groups=(None, 8), num_pages=40))
    harness.add(request(1, prompt=tuple(range(31)), max_tokens=5))
    harness.step()
    harness.step()
    slot = next(slot for slot in harness.executor._slots if slot is not None)
    harm(slot.tables)
    with pytest.raises(AssertionError, match=message):
        harness.step()


def test_the_fake_executor_does_not_read_behind_a_window():
    harness = Harness(limits(page_groups=(None, 8), num_pages=40))
    asked = request(1, prompt=tuple(range(31)), max_tokens=5)
    harness.add(asked)
    harness.step()
    harness.step()
    slot = next(slot for slot in harness.executor._slots if slot is not None)
    slot.tables[1][0] = slot.tables[1][1] = slot.tables[0][0]
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)
