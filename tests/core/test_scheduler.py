"""The contents of each step, case by case. The random interleavings are in test_schedules.py."""

import pytest

from quire.core.plan import Kind, StepResult
from quire.core.sequence import Sequence
from quire.core.stats import Blocker
from quire.core.step_builder import StepBuilder
from quire.errors import RequestFailed
from quire.request import FinishReason, SamplingParams
from tests.core.harness import GREEDY, Harness, limits, request
from tests.fake_executor import NAN, expected_prompt_logprobs, expected_tokens


def test_a_request_runs_to_its_length_and_leaves_nothing():
    harness = Harness(limits())
    asked = request(1, max_tokens=5)
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)
    assert harness.finished[1, 0] is FinishReason.LENGTH


def test_every_running_decode_advances_in_every_step_while_a_long_prompt_fills():
    harness = Harness(limits(max_batch_prefill_tokens=3, num_pages=64))
    harness.add(request(1, prompt=(1, 2, 3), max_tokens=40))
    harness.add(request(2, prompt=(4, 5), max_tokens=40))
    harness.step()
    harness.step()
    harness.add(request(3, prompt=tuple(range(30)), max_tokens=1))
    before = len(harness.tokens[1, 0]), len(harness.tokens[2, 0])
    for _ in range(8):
        harness.step()
    assert (3, 0) not in harness.tokens
    assert (len(harness.tokens[1, 0]), len(harness.tokens[2, 0])) == (before[0] + 8, before[1] + 8)


def test_several_prefills_share_a_step_within_the_budget():
    harness = Harness(limits(max_batch_prefill_tokens=10))
    for request_id in range(3):
        harness.add(request(request_id, prompt=tuple(range(request_id, request_id + 4)), max_tokens=2))
    plan = harness.plan()
    assert [(chunk.start, chunk.length, chunk.samples) for chunk in plan.chunks] == [
        (0, 4, True),
        (0, 4, True),
        (0, 2, False),
    ]


def test_a_step_that_needs_no_page_takes_none():
    harness = Harness(limits(page_size=4))
    harness.add(request(1, prompt=(1, 2), max_tokens=8))
    new_pages = []
    while harness.scheduler.num_requests:
        plan = harness.plan()
        new_pages.append(len(*plan.chunks[0].new_pages or ((),)))
        harness.complete()
    assert new_pages == [1, 0, 0, 1, 0, 0, 0, 1]


def test_a_decode_is_planned_before_the_host_knows_its_token():
    harness = Harness(limits(), lookahead=1)
    harness.add(request(1, max_tokens=8))
    first, second = harness.plan(), harness.plan()
    assert first.chunks[0].kind is Kind.PREFILL
    assert first.started[0].prompt == (1, 2, 3)
    assert second.chunks[0].kind is Kind.DECODE
    assert second.chunks[0].start == 3


def test_no_step_is_planned_past_the_length():
    harness = Harness(limits(), lookahead=2)
    harness.add(request(1, max_tokens=2))
    assert harness.plan() is not None
    assert harness.plan() is not None
    assert harness.plan() is None


def test_out_of_pages_the_youngest_is_preempted_and_loses_no_token():
    harness = Harness(limits(num_pages=9, max_sequence_tokens=32), lookahead=1)
    asked = [request(index, prompt=(index, 5), max_tokens=22) for index in range(3)]
    for one in asked:
        harness.add(one)
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    for one in asked:
        assert harness.tokens[one.request_id, 0] == expected_tokens(one)
    order = list(harness.finished)
    assert order == sorted(order), "an older sequence was made to wait for a younger one"


def test_out_of_pages_the_least_important_is_preempted_though_it_is_the_oldest():
    harness = Harness(limits(num_pages=9, max_sequence_tokens=32), lookahead=1)
    harness.add(request(0, prompt=(0, 5), max_tokens=22, priority=1))
    harness.step()
    for index in (1, 2):
        harness.add(request(index, prompt=(index, 5), max_tokens=22, priority=0))
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    order = [request_id for request_id, _ in harness.finished]
    assert order == [1, 2, 0]


def test_end_of_sequence_stops_at_once_even_with_steps_in_flight():
    harness = Harness(limits(), lookahead=2)
    free = request(1, max_tokens=30, sampling=GREEDY)
    end = expected_tokens(free)[7]
    first = expected_tokens(free).index(end)
    harness.add(request(1, max_tokens=30, sampling=GREEDY, end_ids=(end,)))
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(free)[: first + 1]
    assert harness.finished[1, 0] is FinishReason.END


def test_stop_tokens_are_told_apart_from_the_end_and_min_tokens_delays_both():
    harness = Harness(limits())
    asked = request(1, max_tokens=30, end_ids=(1,), stop_ids=tuple(range(2, 48)), min_tokens=3)
    harness.add(asked)
    harness.run()
    assert len(harness.tokens[1, 0]) >= 3
    assert harness.tokens[1, 0] == expected_tokens(asked)
    assert harness.finished[1, 0] in (FinishReason.STOP_TOKEN, FinishReason.END)


def test_the_end_can_be_ignored():
    harness = Harness(limits())
    harness.add(request(1, max_tokens=12, end_ids=tuple(range(50)), ignore_end=True))
    harness.run()
    assert len(harness.tokens[1, 0]) == 12


def test_a_request_for_no_tokens_computes_its_prompt_and_ends():
    harness = Harness(limits(max_batch_prefill_tokens=4), lookahead=1)
    asked = request(1, prompt=tuple(range(10)), max_tokens=0, prompt_logprobs=1)
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == []
    assert harness.finished[1, 0] is FinishReason.LENGTH
    assert harness.prompt_logprobs[1, 0] == expected_prompt_logprobs(asked)


def test_a_row_without_a_result_fails_alone():
    harness = Harness(limits(), lookahead=1)
    harness.add(request(1, max_tokens=6))
    harness.add(request(2, prompt=(NAN, 1), max_tokens=6))
    harness.run()
    assert isinstance(harness.failures[2].error, RequestFailed)
    assert harness.finished[1, 0] is FinishReason.LENGTH


def test_a_lost_device_loses_no_token():
    harness = Harness(limits(), lookahead=2)
    asked = [request(index, prompt=(index, 1, 2), max_tokens=12) for index in range(3)]
    for one in asked:
        harness.add(one)
    for _ in range(4):
        harness.step()
    harness.lose_everything()
    harness.run()
    for one in asked:
        assert harness.tokens[one.request_id, 0] == expected_tokens(one)


def test_a_result_of_the_wrong_step_is_refused():
    harness = Harness(limits(), lookahead=1)
    harness.add(request(1))
    harness.plan()
    harness.plan()
    result = harness.in_flight[1][1].result()
    with pytest.raises(ValueError, match="step 1 is the oldest in flight, the result is of step 2"):
        harness.scheduler.complete(result)


def test_a_result_without_tokens_for_every_row_is_refused():
    harness = Harness(limits())
    for request_id in range(3):
        harness.add(request(request_id, prompt=(request_id, 1)))
    plan = harness.plan()
    with pytest.raises(ValueError, match="step 1 samples in 3 chunks, the result has 2"):
        harness.scheduler.complete(StepResult(plan.step, [[1], [2]]))


def test_log_probabilities_go_with_their_tokens():
    harness = Harness(limits(), lookahead=1)
    asked = request(1, max_tokens=6, sampling=SamplingParams(temperature=0, logprobs=1))
    harness.add(asked)
    harness.add(request(2, prompt=(9,), max_tokens=6))
    harness.run()
    assert [one.top_ids[0] for one in harness.logprobs[1, 0]] == expected_tokens(asked)
    assert harness.logprobs[2, 0] == []


def test_the_minimum_is_reached_before_a_stop_counts():
    """The token that ends it may come as the last of the minimum, not before."""
    harness = Harness(limits())
    free = expected_tokens(request(1, max_tokens=9, sampling=GREEDY))
    asked = request(1, max_tokens=9, sampling=GREEDY, min_tokens=3, stop_ids=(free[2], free[1]))
    harness.add(asked)
    plan = harness.plan()
    harness.in_flight.clear()
    scheduler = harness.scheduler
    tokens = []
    for token in (free[1], free[1], free[2]):
        updates, _ = scheduler.complete(StepResult(plan.step, [[token]]))
        tokens += updates[0].tokens
        plan = scheduler.plan()
    assert tokens == [free[1], free[1], free[2]]
    assert updates[0].finish is FinishReason.STOP_TOKEN
    assert plan is None


LONG = tuple(number % 40 for number in range(100))


def prefilled(plan) -> dict[int, int]:
    return {chunk.request_id: chunk.length for chunk in plan.chunks if chunk.kind is Kind.PREFILL}


def test_short_prompts_are_not_stuck_behind_a_long_one():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, max_batch_size=8))
    harness.add(request(1, prompt=LONG, max_tokens=2))
    harness.add(request(2, prompt=(1, 2, 3), max_tokens=2))
    harness.add(request(3, prompt=(4, 5, 6), max_tokens=2))
    steps = [prefilled(harness.plan())]
    harness.complete()
    steps.append(prefilled(harness.plan()))
    assert steps == [{1: 13, 2: 3}, {1: 12, 3: 3}], "a quarter of 16 is for those behind"
    harness.run()
    assert list(harness.finished) == [(2, 0), (3, 0), (1, 0)]


def test_a_short_prompt_passes_several_long_ones():
    harness = Harness(limits(num_pages=400, max_sequence_tokens=400, max_batch_size=8, max_step_tokens=80,
                             max_batch_prefill_tokens=64))  # fmt: skip
    for request_id in (1, 2, 3):
        harness.add(request(request_id, prompt=(request_id, *LONG[1:]), max_tokens=2))
    harness.add(request(4, prompt=(7, 8, 9), max_tokens=2))
    assert prefilled(harness.plan()) == {1: 61, 4: 3}
    harness.run()
    assert list(harness.finished) == [(4, 0), (1, 0), (2, 0), (3, 0)]


def test_few_long_prompts_are_passed_in_a_step():
    """A step never looks at more of a long line."""
    harness = Harness(limits(num_pages=400, max_sequence_tokens=400, max_batch_size=8))
    for request_id in range(1, 8):
        harness.add(request(request_id, prompt=(request_id, *LONG[1:]), max_tokens=2))
    harness.add(request(8, prompt=(7, 8, 9), max_tokens=2))
    assert prefilled(harness.plan()) == {1: 16}
    assert harness.scheduler.blocked_by is Blocker.PREFILL_TOKENS
    harness.run()
    assert list(harness.finished) == [(1, 0), (2, 0), (8, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)]


def test_a_long_prompt_has_what_those_behind_it_leave():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200))
    harness.add(request(1, prompt=LONG, max_tokens=2))
    assert prefilled(harness.plan()) == {1: 16}
    harness.complete()
    harness.add(request(2, prompt=(1,), max_tokens=2))
    assert prefilled(harness.plan()) == {1: 15, 2: 1}


def test_a_chunk_brings_the_pages_that_it_fills_and_no_more():
    """Programs have room for the page table entries of a step's tokens."""
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, page_size=2, max_batch_size=2))
    harness.add(request(1, prompt=LONG, max_tokens=2))
    harness.plan()
    harness.complete()
    harness.add(request(2, prompt=(1, 2, 3, 4), max_tokens=2, prompt_logprobs=1))
    plan = harness.plan()
    assert {chunk.request_id: len(chunk.new_pages[0]) for chunk in plan.chunks} == {1: 6, 2: 2}
    assert prefilled(plan) == {1: 12, 2: 4}
    harness.run()


def test_prompts_beside_decodes_can_be_held_to_fewer_tokens():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200))
    harness.scheduler.budget.max_prefill_beside_decodes = 5
    harness.add(request(1, prompt=tuple(range(20)), max_tokens=4))
    harness.add(request(2, prompt=(1, 2), max_tokens=40))
    steps = []
    for _ in range(3):
        steps.append(prefilled(harness.plan()))
        harness.complete()
    assert steps == [{1: 14, 2: 2}, {1: 5}, {1: 1}], "alone it has all of the budget"
    harness.run()


def test_short_prompts_are_not_stuck_where_steps_are_held_to_few_tokens():
    """One at a time begins in a share that it does not fit, if it would fit the share of a full step."""
    harness = Harness(limits(num_pages=400, max_sequence_tokens=400, max_batch_size=8, max_step_tokens=80,
                             max_batch_prefill_tokens=64))  # fmt: skip
    harness.add(request(1, prompt=(1, 2), max_tokens=40))
    harness.step()
    harness.scheduler.budget.max_prefill_beside_decodes = 16
    harness.add(request(2, prompt=LONG, max_tokens=2))
    harness.add(request(3, prompt=LONG[7:24], max_tokens=2))  # longer than a quarter of 64
    harness.add(request(4, prompt=LONG[3:9], max_tokens=2))
    harness.add(request(5, prompt=LONG[5:10], max_tokens=2))
    steps = []
    for _ in range(4):
        steps.append(prefilled(harness.plan()))
        harness.complete()
    assert steps == [{2: 12, 4: 4}, {2: 14, 4: 2}, {2: 12, 5: 4}, {2: 15, 5: 1}]
    harness.run()


def test_a_prompt_is_cut_where_its_step_would_be_a_little_longer_than_a_good_size():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200))
    harness.scheduler.budget.step_sizes = (10, 400)
    harness.add(request(1, prompt=LONG[:12], max_tokens=4))
    assert prefilled(harness.plan()) == {1: 10}, "two tokens are computed in the next step, not 388 of padding in this"
    harness.complete()
    assert prefilled(harness.plan()) == {1: 2}
    harness.run()


def test_a_prompt_is_not_cut_for_less_padding_than_another_step_costs():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200))
    harness.scheduler.budget.step_sizes = (10, 100)
    harness.add(request(1, prompt=LONG[:12], max_tokens=40))
    assert prefilled(harness.plan()) == {1: 12}
    harness.complete()
    harness.add(request(2, prompt=LONG[20:34], max_tokens=4))
    assert prefilled(harness.plan()) == {2: 9}, "beside a decode there is another step anyway"
    harness.run()


def test_a_prompt_beside_guesses_alone_is_cut_as_beside_decodes():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, max_step_tokens=32, max_guesses=3))
    harness.scheduler.budget.step_sizes = (10, 100)
    harness.add(request(1, prompt=(1, 2), max_tokens=40))
    harness.step()
    harness.add(request(2, prompt=LONG[20:30], max_tokens=4))
    plan = harness.plan()
    assert (plan.num_decodes, plan.num_verified) == (0, 1)
    assert plan.num_tokens == 10, "beside them there is another step anyway"
    harness.run()


def test_the_last_prompt_is_cut_and_those_before_it_are_whole():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200))
    harness.scheduler.budget.step_sizes = (10, 400)
    harness.add(request(1, prompt=LONG[:6], max_tokens=4))
    harness.add(request(2, prompt=LONG[10:17], max_tokens=4))
    assert prefilled(harness.plan()) == {1: 6, 2: 4}
    harness.run()


def test_a_prompt_that_ends_is_not_cut_while_a_younger_one_begins():
    harness = Harness(limits(max_step_tokens=16, max_batch_prefill_tokens=16))
    harness.scheduler.budget.step_sizes = (8, 400)
    harness.add(request(1, prompt=LONG[:12], max_tokens=4))
    harness.add(request(2, prompt=LONG[20:40], max_tokens=4))
    assert prefilled(harness.plan()) == {1: 12, 2: 4}
    harness.run()


def test_prompts_held_to_few_tokens_fill_a_good_size_beside_their_decodes():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200))
    harness.add(request(1, prompt=(1, 2), max_tokens=40))
    harness.step()
    harness.scheduler.budget.max_prefill_beside_decodes = 12
    harness.scheduler.budget.step_sizes = (4, 8, 16)
    harness.add(request(2, prompt=LONG, max_tokens=2))
    assert prefilled(harness.plan()) == {2: 7}, "a decode and 7 tokens are 8; 12 would be padded to 16"
    harness.scheduler.budget.step_sizes = (1, 90)
    harness.complete()
    assert prefilled(harness.plan()) == {2: 12}, "no size has room for a prompt"
    harness.run()


def test_a_good_size_with_room_for_next_to_nothing_is_none():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200))
    harness.add(request(1, prompt=(1, 2), max_tokens=40))
    harness.step()
    harness.scheduler.budget.max_prefill_beside_decodes = 12
    harness.add(request(2, prompt=LONG + LONG[3:], max_tokens=2))
    for sizes, room in (((6, 90), 12), ((7, 90), 6)):
        harness.scheduler.budget.step_sizes = sizes
        assert prefilled(harness.plan()) == {2: room}
        harness.complete()
    harness.run()


def test_a_chunk_without_positions_is_a_fault_of_the_planner() -> None:
    sequence = Sequence(1, request(1), 0, "")
    with pytest.raises(AssertionError, match="a chunk of request 1 has 0 positions"):
        StepBuilder().add(sequence, Kind.DECODE, 0, 0, True)
