"""Snapshots of the state that slots have beside pages: a prefix continues from one, and from nothing else."""

import pytest

from quire.core.plan import Kind
from quire.reach import ChunkReach
from tests.core.harness import GREEDY, Harness, limits, request
from tests.core.test_scheduler import prefilled
from tests.fake_executor import NAN, expected_tokens


def harness(lookahead: int = 1, **changes: object) -> Harness:
    """As many snapshots as are wanted, at any distance."""
    return Harness(limits(**{"snapshots": 16, "snapshot_tokens": 0, "num_pages": 65} | changes), lookahead)


def computed(one: Harness) -> int:
    """Tokens of prompts that the steps so far computed."""
    chunks = [chunk for plan in one.executor.plans for chunk in plan.chunks]
    return sum(chunk.length for chunk in chunks if chunk.kind is Kind.PREFILL)


def run(one: Harness, number: int, prompt: tuple[int, ...], **changes: object) -> int:
    """Run one request to its end; returns the tokens of its prompt that it began with."""
    asked = request(number, prompt=prompt, **changes)
    one.add(asked)
    one.run()
    for sample in range(asked.samples):
        assert one.tokens[number, sample] == expected_tokens(asked, sample)
    return one.cached[number, 0]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_the_next_turn_of_a_conversation_begins_after_the_last_whole_page_of_the_answer(lookahead: int):
    one, prompt = harness(lookahead), tuple(range(10))
    assert run(one, 1, prompt, max_tokens=9) == 0
    spoken = (*prompt, *one.tokens[1, 0])
    # The last token of an answer is not computed: 18 are, and a page has 4.
    assert run(one, 2, (*spoken, 1, 2, 3)) == 16


def test_the_same_prompt_begins_after_its_last_whole_page():
    one = harness()
    assert [run(one, number, tuple(range(12)), max_tokens=1) for number in (1, 2)] == [0, 8]
    assert run(one, 3, tuple(range(13)), max_tokens=1) == 8, "no state was saved at the end of a prompt's last page"


def test_prompts_that_begin_alike_share_their_beginning_from_the_third_on():
    """The first shows nothing; the second, where it went on differently."""
    one, system = harness(), tuple(range(12))
    found = [run(one, number, (*system, *[number] * 9), max_tokens=1) for number in (20, 21, 22, 23)]
    assert found == [0, 0, 12, 12]


@pytest.mark.parametrize("distance", [13, 12])
def test_a_prompt_is_cut_for_a_snapshot_only_where_it_is_far_from_the_last(distance: int):
    one = harness(snapshot_tokens=distance)
    run(one, 1, tuple(range(15)), max_tokens=1)
    chunks = [chunk.length for plan in one.executor.plans for chunk in plan.chunks]
    assert chunks == ([15] if distance == 13 else [12, 3])


def test_samples_of_one_request_compute_its_prompt_once():
    one = harness()
    run(one, 1, tuple(range(14)), samples=3)
    assert computed(one) == 14 + 2 * 2


def test_equal_prompts_wait_for_the_snapshot_of_the_first():
    one = harness()
    for number in (1, 2, 3):
        one.add(request(number, prompt=tuple(range(14))))
    one.plan()
    assert one.scheduler.num_running == 1
    one.run()
    assert [one.cached[number, 0] for number in (1, 2, 3)] == [0, 12, 12]


@pytest.mark.parametrize("other", [(*range(11), 30, 31), tuple(range(12)), tuple(range(9))])
def test_prompts_that_cannot_begin_with_that_snapshot_do_not_wait_for_it(other: tuple[int, ...]):
    """They go on differently before it, or need the token before it computed, or end before it."""
    one = harness(max_batch_prefill_tokens=32, max_step_tokens=40)
    one.add(request(1, prompt=tuple(range(14))))
    one.add(request(2, prompt=other))
    one.plan()
    assert one.scheduler.num_running == 2
    one.run()


def test_those_that_wait_for_a_snapshot_that_cannot_be_taken_start_without_it():
    one = harness(snapshots=1, max_batch_prefill_tokens=32, max_step_tokens=40)
    for number in (1, 2):  # both take one, and there is one
        one.add(request(number, prompt=tuple(range(number, number + 14))))
        one.add(request(number + 2, prompt=tuple(range(number, number + 14))))
    one.plan()
    assert one.scheduler.num_running == 2
    one.plan()
    assert one.scheduler.num_running == 3
    one.run()
    assert sorted(one.cached.values()) == [0, 0, 0, 12]


def test_one_that_waited_in_vain_starts_behind_what_started_before_it_was_back_in_line():
    """That there is no snapshot for the first is known when the third has started."""
    one = harness(snapshots=1, max_batch_prefill_tokens=14)
    for number in (1, 2):
        one.add(request(number, prompt=tuple(range(21))))
    assert prefilled(one.plan()) == {1: 12}, "it takes the snapshot, and the step is in flight"
    one.add(request(3, prompt=tuple(range(30, 35))))
    assert prefilled(one.plan()) == {1: 8, 3: 4, 2: 2}, "all but the second have what they may have before a cut"
    one.run()


def test_one_that_waits_in_vain_for_what_starts_in_the_same_step_is_behind_those_between_them():
    one = harness(lookahead=2, page_size=2, snapshots=1, max_batch_prefill_tokens=17, max_step_tokens=24)
    one.add(request(1, prompt=(9, 9, 9), max_tokens=0))
    assert [prefilled(one.plan()), prefilled(one.plan())] == [{1: 2}, {1: 1}], "the first step has the snapshot"
    for number, prompt in ((2, (1, 2, 3)), (3, (1, 2, 3, 4, 5)), (4, tuple(range(20, 35)))):
        one.add(request(number, prompt=prompt))
    assert prefilled(one.plan()) == {2: 2, 4: 14, 3: 1}
    one.run()


def test_equal_prompts_wait_until_the_snapshot_is_there_however_many_steps_it_takes():
    one = harness(max_batch_prefill_tokens=8, max_step_tokens=12, snapshot_tokens=20)
    for number in (1, 2):
        one.add(request(number, prompt=tuple(range(30))))
    one.run()
    assert computed(one) == 30 + 2


def test_those_that_wait_for_two_snapshots_wait_for_both():
    one, system = harness(), tuple(range(12))
    run(one, 1, (*system, *[20] * 9), max_tokens=1)
    for number in (2, 3):
        one.add(request(number, prompt=(*system, *range(30, 39))))
    one.run()
    assert [one.cached[number, 0] for number in (2, 3)] == [0, 20]


def test_a_sequence_that_was_preempted_goes_on_from_its_last_snapshot():
    one = harness(num_pages=17)
    asked = [request(1, prompt=tuple(range(20)), max_tokens=24), request(2, prompt=tuple(range(20, 40)), max_tokens=20)]
    for each in asked:
        one.add(each)
    one.run()
    assert one.scheduler.counters.preemptions == 1
    assert all(one.tokens[each.request_id, 0] == expected_tokens(each) for each in asked)
    assert one.scheduler.counters.cached_tokens == 16, "it begins again where its pages were not evicted"


def test_a_prompt_in_several_steps_has_snapshots_where_they_end():
    one = harness(max_batch_prefill_tokens=10, max_step_tokens=14, snapshot_tokens=8)
    one.add(request(1, prompt=tuple(range(30))))
    plans = [one.plan(), one.plan()]
    assert [[chunk.length for chunk in plan.chunks] for plan in plans if plan] == [[8], [8]]
    assert all(plan is not None and len(plan.saves) == 1 for plan in plans)
    one.run()


def test_a_long_prompt_has_no_snapshots_closer_than_they_may_be():
    one = harness(max_batch_prefill_tokens=10, max_step_tokens=14, snapshot_tokens=16)
    one.add(request(1, prompt=tuple(range(48)), max_tokens=1))
    one.run()
    chunks = [(chunk.start + chunk.length, len(plan.saves)) for plan in one.executor.plans for chunk in plan.chunks]
    assert chunks == [(10, 0), (20, 1), (30, 0), (40, 1), (44, 1), (48, 0)], "the last one is of the prompt's end"


@pytest.mark.parametrize(("distance", "count"), [(0, 6), (12, 2), (40, 0)])
def test_the_state_of_an_answer_is_saved_at_that_distance(distance: int, count: int):
    one = harness(snapshot_tokens=distance)
    run(one, 1, (1, 2, 3), max_tokens=25)
    assert sum(len(plan.saves) for plan in one.executor.plans) == count


def test_a_snapshot_that_another_sequence_took_is_not_given_up():
    one, prompt = harness(), tuple(range(10))
    run(one, 1, prompt, max_tokens=9, sampling=GREEDY)
    spoken = (*prompt, *one.tokens[1, 0])
    run(one, 2, prompt, max_tokens=30, sampling=GREEDY)
    assert run(one, 3, (*spoken, 40, 41), max_tokens=1) == 16


@pytest.mark.parametrize(("pages", "length", "chunk", "lookahead"), [(12, 1, 3, 1), (12, 2, 4, 1), (14, 4, 3, 0)])
def test_a_sequence_that_is_preempted_for_the_step_that_saves_its_state_leaves_nothing(
    pages: int, length: int, chunk: int, lookahead: int
):
    """A prompt before it takes the last page in the step in which it comes to the end of one."""
    one = harness(lookahead, num_pages=pages, max_batch_prefill_tokens=chunk, max_step_tokens=8 + chunk)
    asked = [
        request(1, prompt=tuple(range(36)), max_tokens=4, priority=-1),
        request(2, prompt=tuple(range(40, 40 + length)), max_tokens=20),
    ]
    one.add(asked[1])
    one.step()
    one.add(asked[0])
    one.run()
    assert one.scheduler.counters.preemptions > 0
    assert all(one.tokens[each.request_id, 0] == expected_tokens(each) for each in asked)


def test_of_the_snapshots_of_an_answer_a_sequence_keeps_the_last():
    one, prompt = harness(), tuple(range(10))
    run(one, 1, prompt, max_tokens=40)
    assert sum(len(plan.saves) for plan in one.executor.plans) == 11
    assert one.scheduler.stats().snapshots == 2, "one of the prompt, one of the answer"
    spoken = (*prompt, *one.tokens[1, 0])
    assert run(one, 2, spoken, max_tokens=1) == 48
    assert run(one, 3, spoken[:40], max_tokens=1) == 8


def test_the_least_recently_used_snapshot_is_given_up():
    one = harness(snapshots=2)
    prompts = {number: tuple(range(10 * number, 10 * number + 6)) for number in (1, 2, 3)}
    for number in (1, 2):
        run(one, number, prompts[number], max_tokens=1)
    assert run(one, 4, prompts[1], max_tokens=1) == 4
    run(one, 5, prompts[3], max_tokens=1)
    assert run(one, 6, prompts[1], max_tokens=1) == 4, "it was used after the other"
    assert run(one, 7, prompts[2], max_tokens=1) == 0


def test_a_snapshot_goes_with_its_page():
    one = harness(num_pages=9)
    run(one, 1, tuple(range(9)), max_tokens=1)
    assert one.scheduler.stats().snapshots == 1
    run(one, 2, tuple(range(20, 48)), max_tokens=1)
    assert one.scheduler.stats().evicted_pages > 0
    assert run(one, 3, tuple(range(9)), max_tokens=1) == 0


@pytest.mark.parametrize("salt", ["", "another"])
def test_a_snapshot_is_found_under_its_salt_only(salt: str):
    one = harness()
    run(one, 1, tuple(range(9)))
    assert run(one, 2, tuple(range(9)), salt=salt) == (8 if not salt else 0)


def test_without_prefix_caching_only_samples_of_one_request_share():
    one = harness(prefix_caching=False)
    run(one, 1, tuple(range(14)), samples=2)
    assert computed(one) == 14 + 2
    assert one.scheduler.stats().snapshots == 0
    assert run(one, 2, tuple(range(14))) == 0


@pytest.mark.parametrize(("end", "distance", "found"), [(19, 0, 16), (21, 0, 20), (23, 0, 20), (23, 8, 16)])
def test_a_state_computed_beyond_the_end_of_a_burst_is_not_kept(end: int, distance: int, found: int):
    """Bursts of 4 tokens are cut at the ends of pages; a sequence that ends within one has no state there."""
    one, prompt = harness(max_burst=4, snapshot_tokens=distance), tuple(range(10))
    whole = request(1, prompt=prompt, max_tokens=30)
    answer = expected_tokens(whole)
    assert answer[end - 10 - 1] not in answer[: end - 10 - 1]
    run(one, 1, prompt, max_tokens=30, stop_ids=(answer[end - 10 - 1],))
    spoken = (*prompt, *one.tokens[1, 0])
    assert len(spoken) == end
    assert run(one, 2, (*spoken, 1, 2, 3, 4), max_tokens=1) == found


def test_a_sequence_comes_to_an_end_where_the_cache_has_pages_for_its_tokens_and_no_state():
    """Its own pages replace them, so that none stand twice."""
    one = harness(num_pages=17, snapshots=1)
    run(one, 1, tuple(range(40)), max_tokens=1)
    run(one, 2, (50, 51, 52, 53, 54), max_tokens=1)  # it has the only snapshot now
    assert run(one, 3, tuple(range(40)), max_tokens=24) == 0
    assert one.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("num_pages", [5, 6])
def test_the_snapshot_that_a_slot_begins_with_stays_while_pages_are_taken(num_pages: int):
    """A prefix that ends with a chunk reads no page of it, so nothing else keeps it."""
    one = harness(num_pages=num_pages, page_groups=(ChunkReach(8),), max_batch_prefill_tokens=64, max_step_tokens=68)
    assert run(one, 1, tuple(range(17)), max_tokens=1) == 0
    assert run(one, 2, (*range(16), *range(20, 41)), max_tokens=1) == 16


def test_pages_that_stand_twice_make_room_for_one_that_waits():
    one, prompt = harness(num_pages=25, snapshots=1, max_batch_prefill_tokens=64, max_step_tokens=68), tuple(range(40))
    run(one, 1, prompt, max_tokens=1)
    run(one, 2, (41, 42, 43, 44, 45), max_tokens=1)  # takes the only snapshot
    one.add(request(3, prompt=(*prompt, 45, 46, 47, 41, 42), max_tokens=15))
    for _ in range(4):
        one.step()
    one.add(request(4, prompt=(41,) * 20, max_tokens=4))
    one.step()
    assert one.scheduler.num_running == 2
    one.run()
    assert one.scheduler.counters.preemptions == 0


def test_a_lost_device_has_lost_its_snapshots():
    one = harness(lookahead=2)
    one.add(request(1, prompt=tuple(range(14)), max_tokens=12))
    one.step()
    one.plan()
    one.lose_everything()
    assert one.scheduler.stats().snapshots == 0
    one.run()
    assert one.tokens[1, 0] == expected_tokens(request(1, prompt=tuple(range(14)), max_tokens=12))


def test_a_row_without_numbers_leaves_no_snapshot():
    one = harness()
    one.add(request(1, prompt=(*range(8), NAN, 9, 10, 11, 12, 13), max_tokens=3))
    one.run()
    assert 1 in one.failures
    assert one.scheduler.stats().snapshots == 0


@pytest.mark.parametrize("changes", [{"snapshots": -1}, {"snapshots": 2, "snapshot_tokens": -1}])
def test_negative_numbers_of_snapshots_are_refused(changes: dict[str, int]):
    with pytest.raises(ValueError, match="must be at least 0"):
        limits(**changes)


def test_a_state_that_goes_with_the_pages_which_are_evicted_for_its_reader_is_not_begun_with():
    """The last prompt begins like the first, of whose second page only the state is left. It takes the page after it,
    and with that the state goes."""
    one, begin = harness(page_groups=(ChunkReach(4),), num_pages=3, max_batch_size=1), tuple(range(8))
    assert run(one, 1, (*begin, 20, 20, 20, 20), max_tokens=1) == 0
    assert run(one, 2, begin[:4], max_tokens=1) == 0
    assert run(one, 3, (*begin, 22, 22), max_tokens=1) == 0
