"""What each step holds, case by case. The random interleavings are in test_schedules.py."""

import pytest

from quire.core.plan import StepResult
from quire.errors import DeadlineExceeded, InvalidRequest, Overloaded, PromptTooLong, RequestFailed
from quire.request import FinishReason, SamplingParams
from tests.core.harness import GREEDY, Harness, limits, request
from tests.fake_executor import NAN, drafter, expected_prompt_logprobs, expected_tokens


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
        new_pages.append(len(plan.chunks[0].new_pages))
        harness.complete()
    assert new_pages == [1, 0, 0, 1, 0, 0, 0, 1]


def test_a_decode_is_planned_before_the_host_knows_its_token():
    harness = Harness(limits(), lookahead=1)
    harness.add(request(1, max_tokens=8))
    first, second = harness.plan(), harness.plan()
    assert first.chunks[0].tokens == (1, 2, 3)
    assert second.chunks[0].tokens is None
    assert second.chunks[0].start == 3


def test_no_step_is_planned_past_the_length():
    harness = Harness(limits(), lookahead=2)
    harness.add(request(1, max_tokens=2))
    assert harness.plan() is not None
    assert harness.plan() is not None
    assert harness.plan() is None


def test_a_row_that_waits_for_the_host_is_not_planned_ahead_while_others_are():
    harness = Harness(limits(), lookahead=2)
    harness.add(request(1, prompt=(1, 2), max_tokens=6, waits_for_host=True))
    harness.add(request(2, prompt=(3, 4), max_tokens=6))
    plans = [harness.plan(), harness.plan(), harness.plan()]
    assert [len(plan.chunks) for plan in plans] == [2, 1, 1]
    harness.complete()
    assert len(harness.plan().chunks) == 2
    harness.run()


def test_a_cached_prefix_is_not_computed_again():
    harness = Harness(limits())
    prompt = tuple(range(10))
    harness.add(request(1, prompt=prompt, max_tokens=3))
    harness.run()
    harness.add(request(2, prompt=prompt, max_tokens=3))
    plan = harness.plan()
    assert (plan.chunks[0].start, plan.chunks[0].length) == (8, 2)
    harness.run()
    assert harness.cached[2, 0] == 8


def test_a_fully_cached_prompt_still_computes_its_last_token():
    harness = Harness(limits())
    prompt = tuple(range(8))
    harness.add(request(1, prompt=prompt, max_tokens=3))
    harness.run()
    harness.add(request(2, prompt=prompt, max_tokens=3))
    plan = harness.plan()
    assert (plan.chunks[0].start, plan.chunks[0].length) == (4, 4)


def test_generated_tokens_are_cached_for_the_next_turn():
    harness = Harness(limits())
    first = request(1, prompt=tuple(range(6)), max_tokens=8)
    harness.add(first)
    harness.run()
    harness.add(request(2, prompt=first.prompt + tuple(expected_tokens(first)) + (9, 9), max_tokens=1))
    assert harness.plan().chunks[0].start == 12


def test_salts_keep_equal_prompts_apart():
    harness = Harness(limits())
    prompt = tuple(range(12))
    harness.add(request(1, prompt=prompt, max_tokens=1, salt="a"))
    harness.run()
    harness.add(request(2, prompt=prompt, max_tokens=1, salt="b"))
    harness.add(request(3, prompt=prompt, max_tokens=1, salt="a"))
    harness.run()
    assert (harness.cached[2, 0], harness.cached[3, 0]) == (0, 8)


def test_prompts_whose_positions_are_computed_differently_share_nothing():
    harness = Harness(limits(), prefix_key=lambda length: int(length > 12))
    for request_id, length in ((1, 12), (2, 13), (3, 11), (4, 14)):
        harness.add(request(request_id, prompt=tuple(range(length)), max_tokens=1))
        harness.run()
    assert [harness.cached[request_id, 0] for request_id in (1, 2, 3, 4)] == [0, 0, 8, 12]


def test_pages_are_not_shared_before_their_step_has_completed():
    harness = Harness(limits(), lookahead=1)
    prompt = tuple(range(12))
    harness.add(request(1, prompt=prompt, max_tokens=2))
    harness.plan()
    harness.abort(1)  # while its step is under way
    harness.add(request(2, prompt=prompt, max_tokens=2))
    assert harness.plan().chunks[-1].start == 0
    harness.run()


def test_a_crowd_with_one_prefix_computes_it_once():
    harness = Harness(limits(max_batch_size=8, num_pages=64))
    prompt = tuple(range(12))
    for request_id in range(6):
        harness.add(request(request_id, prompt=(*prompt, request_id), max_tokens=2))
    harness.run()
    prefill = sum(c.length for plan in harness.executor.plans for c in plan.chunks if c.tokens is not None)
    assert prefill == 13 + 5 * 1


def test_those_that_wait_for_a_prefix_go_on_when_its_sequence_is_aborted():
    harness = Harness(limits(max_batch_prefill_tokens=4))
    for request_id in (1, 2):
        harness.add(request(request_id, prompt=tuple(range(20)), max_tokens=2))
    harness.step()
    harness.abort(1)
    harness.run()
    assert harness.finished[2, 0] is FinishReason.LENGTH


def test_one_that_waits_for_a_prefix_can_be_aborted():
    harness = Harness(limits())
    for request_id in (1, 2, 3):
        harness.add(request(request_id, prompt=tuple(range(12)), max_tokens=2))
    harness.plan()
    harness.abort(2)
    assert harness.scheduler.num_waiting == 1
    harness.run()
    assert set(harness.finished) == {(1, 0), (3, 0)}


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_share_the_pages_of_their_prompt(prefix_caching):
    harness = Harness(limits(prefix_caching=prefix_caching))
    asked = request(1, prompt=tuple(range(12)), max_tokens=3, samples=3)
    harness.add(asked)
    harness.step()
    harness.step()
    shared = {chunk.new_pages[:2] for plan in harness.executor.plans for chunk in plan.chunks if chunk.tokens}
    assert len(shared) == 1
    harness.run()
    outputs = [harness.tokens[1, index] for index in range(3)]
    assert outputs == [expected_tokens(asked, index) for index in range(3)]
    assert outputs[0] != outputs[1]


def test_without_prefix_caching_nothing_is_cached_between_requests():
    harness = Harness(limits(prefix_caching=False))
    for request_id in (1, 2):
        harness.add(request(request_id, prompt=tuple(range(12)), max_tokens=3))
        harness.run()
    assert harness.cached[2, 0] == 0
    assert harness.scheduler.num_cached_pages == 0


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    harness = Harness(limits(num_pages=9, max_sequence_tokens=32))
    old, fresh = tuple(range(12)), tuple(range(20, 32))
    harness.add(request(1, prompt=old, max_tokens=1))
    harness.run()
    harness.add(request(2, prompt=fresh, max_tokens=1))
    harness.run()
    harness.add(request(3, prompt=tuple(range(30, 42)), max_tokens=1))
    harness.run()
    harness.add(request(4, prompt=fresh, max_tokens=1))
    harness.run()
    harness.add(request(5, prompt=old, max_tokens=1))
    harness.run()
    assert harness.cached[4, 0] == 8
    assert harness.cached[5, 0] == 4


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


def test_a_lower_priority_number_is_admitted_first():
    harness = Harness(limits(max_batch_size=1))
    for request_id, priority in ((1, 5), (2, 0), (3, 5), (4, -1)):
        harness.add(request(request_id, priority=priority, max_tokens=2))
    harness.run()
    assert [key[0] for key in harness.finished] == [4, 2, 1, 3]


def test_the_queue_has_a_bound_and_says_when_to_retry():
    now = [0.0]
    harness = Harness(limits(max_batch_size=1, max_queued=3), clock=lambda: now[0])
    for request_id in range(3):
        harness.add(request(request_id, max_tokens=2))
    with pytest.raises(Overloaded, match="3 sequences wait, the queue takes 3") as refused:
        harness.add(request(9))
    assert refused.value.retry_after_s >= 1
    while harness.scheduler.num_requests:
        now[0] += 30
        harness.step()
    for request_id in range(3):
        harness.add(request(request_id, max_tokens=2))
    with pytest.raises(Overloaded) as refused:
        harness.add(request(9))
    assert refused.value.retry_after_s > 10, "the measured rate is not used"


def test_a_place_is_kept_for_who_comes_back_as_told_and_none_where_nobody_waits():
    now = [0.0]
    harness = Harness(limits(max_batch_size=1, max_queued=4), clock=lambda: now[0])
    for request_id in range(4):
        harness.add(request(request_id, prompt=(1, request_id), max_tokens=3))
    told = {}
    for request_id in (10, 11):
        with pytest.raises(Overloaded) as refused:
            harness.add(request(request_id, prompt=(2, request_id)))
        told[request_id] = refused.value.retry_after_s
    assert 1 <= told[10] < told[11]
    while harness.scheduler.num_waiting > 2:
        harness.step()
    now[0] = told[11]
    with pytest.raises(Overloaded, match="2 sequences wait and 2 places are kept for those who come back"):
        harness.add(request(12, prompt=(3, 3)))
    harness.add(request(13, prompt=(2, 10)))  # it is what it asks, and not how it is numbered
    harness.add(request(14, prompt=(2, 11)))
    assert harness.scheduler.num_waiting == 4
    while harness.scheduler.num_waiting > 2:
        harness.step()
    harness.add(request(15, prompt=(3, 4)))  # one place is kept for the one that was refused last, and no others
    harness.run()
    now[0] += 60  # whoever has not come back by now does not
    for request_id in range(20, 24):
        harness.add(request(request_id, prompt=(4, request_id), max_tokens=2))
    with pytest.raises(Overloaded):
        harness.add(request(24, prompt=(4, 24)))
    harness.run()
    now[0] += 1
    harness.add(request(30, prompt=(5, 5), samples=4))  # nobody waits


def test_a_request_that_waits_too_long_is_refused_and_one_that_runs_is_not():
    now = [0.0]
    harness = Harness(limits(max_batch_size=1), clock=lambda: now[0])
    harness.add(request(1, max_tokens=20, queue_timeout_s=5))
    harness.add(request(2, max_tokens=20, queue_timeout_s=5))
    harness.step()
    now[0] = 6.0
    harness.run()
    assert isinstance(harness.failures[2].error, DeadlineExceeded)
    assert harness.failures[2].error.retry_after_s is not None
    assert harness.finished[1, 0] is FinishReason.LENGTH


def test_a_request_that_runs_too_long_is_ended():
    now = [0.0]
    harness = Harness(limits(), clock=lambda: now[0])
    harness.add(request(1, max_tokens=20, timeout_s=5))
    harness.step()
    now[0] = 5.0
    harness.plan()
    assert isinstance(harness.failures[1].error, DeadlineExceeded)
    harness.check_nothing_is_left() if not harness.in_flight else harness.run()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (tuple(range(45)), 20, "prompt of 45 tokens \\+ max_tokens of 20 = 65; the limit is 64"),
        (tuple(range(30)), 4, "the cache holds 32"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(prompt, max_tokens, message):
    harness = Harness(limits(num_pages=9))
    with pytest.raises(PromptTooLong, match=message):
        harness.add(request(1, prompt=prompt, max_tokens=max_tokens))
    assert harness.scheduler.num_requests == 0


def test_what_exactly_fits_runs():
    harness = Harness(limits(num_pages=9, max_sequence_tokens=32))
    asked = request(1, prompt=tuple(range(16)), max_tokens=16)
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)


def test_an_id_in_use_is_refused():
    harness = Harness(limits())
    harness.add(request(1))
    with pytest.raises(InvalidRequest, match="request_id 1 is in use"):
        harness.add(request(1))


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


def test_prompt_logprobs_are_complete_although_the_prefix_is_cached():
    harness = Harness(limits())
    for request_id in (1, 2):
        asked = request(request_id, prompt=tuple(range(10)), prompt_logprobs=1)
        harness.add(asked)
        harness.run()
        assert harness.prompt_logprobs[request_id, 0] == expected_prompt_logprobs(asked)


def test_a_row_without_a_result_fails_alone():
    harness = Harness(limits(), lookahead=1)
    harness.add(request(1, max_tokens=6))
    harness.add(request(2, prompt=(NAN, 1), max_tokens=6))
    harness.run()
    assert isinstance(harness.failures[2].error, RequestFailed)
    assert harness.finished[1, 0] is FinishReason.LENGTH


def test_admissions_wait_until_enough_requests_queue_or_enough_steps_passed():
    harness = Harness(limits(max_batch_size=8, waiting_served_ratio=1.0, max_waiting_tokens=5))
    for request_id in range(4):
        harness.add(request(request_id, prompt=(request_id, 1), max_tokens=20))
    harness.step()
    harness.add(request(10, prompt=(40, 1), max_tokens=2))
    waited = 0
    while harness.scheduler.num_waiting:
        harness.step()
        waited += 1
    assert waited == 5
    for request_id in range(20, 25):
        harness.add(request(request_id, prompt=(request_id, 1), max_tokens=2))
    harness.step()
    assert harness.scheduler.num_waiting < 5


def test_the_batch_has_a_bound_on_its_total_tokens():
    harness = Harness(limits(max_batch_total_tokens=30, max_sequence_tokens=30))
    for request_id in range(3):
        harness.add(request(request_id, prompt=(1, 2), max_tokens=10))
    harness.step()
    assert harness.scheduler.num_running == 2
    assert harness.scheduler.blocked_by == "max_batch_total_tokens"
    harness.run()


def test_guesses_are_checked_and_the_right_ones_save_steps():
    harness = Harness(limits(), drafter=drafter, lookahead=1)
    asked = request(1, prompt=tuple(range(9)), max_tokens=40, sampling=GREEDY)
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)
    assert len(harness.executor.plans) < 35


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


def test_only_the_requests_in_focus_run():
    harness = Harness(limits())
    for request_id in range(4):
        harness.add(request(request_id, prompt=(request_id, 1, 2), max_tokens=6))
    harness.step()
    harness.scheduler.focus([1, 2])
    harness.scheduler.check()
    told = {key: len(tokens) for key, tokens in harness.tokens.items()}
    for _ in range(3):
        harness.step()
    moved = {key[0] for key, tokens in harness.tokens.items() if len(tokens) > told[key]}
    assert moved == {1, 2}
    harness.scheduler.focus(None)
    harness.run()


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


def test_a_long_line_for_one_prefix_is_not_looked_through_in_one_step():
    harness = Harness(limits(max_batch_size=4, num_pages=64))
    for request_id in range(40):
        harness.add(request(request_id, prompt=(*range(12), request_id), max_tokens=2))
    harness.plan()
    assert harness.scheduler.blocked_by == "shared_prefix"
    harness.run()
    prefill = sum(c.length for plan in harness.executor.plans for c in plan.chunks if c.tokens is not None)
    assert prefill == 13 + 39 * 1


def test_nobody_is_admitted_past_a_prefill_that_is_short_of_pages():
    harness = Harness(limits(num_pages=11, max_sequence_tokens=40, max_batch_prefill_tokens=2))
    decode = request(1, prompt=(1, 2, 3), max_tokens=33)
    harness.add(decode)
    harness.step()
    harness.add(request(2, prompt=tuple(range(10, 42)), max_tokens=1))
    while harness.scheduler.blocked_by != "pages":
        harness.step()
        assert harness.scheduler.num_requests == 2
    assert harness.scheduler.num_running == 2
    harness.add(request(3, prompt=(7,), max_tokens=2))
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(decode)
    assert list(harness.finished) == [(1, 0), (2, 0), (3, 0)]


def test_a_request_for_too_many_samples_is_refused():
    harness = Harness(limits())
    with pytest.raises(InvalidRequest, match="samples is 1000000000; the limit is 128"):
        harness.add(request(1, samples=10**9))


def test_any_text_can_be_a_salt():
    harness = Harness(limits())
    for request_id in (1, 2):
        harness.add(request(request_id, prompt=tuple(range(9)), salt="\ud800"))
        harness.run()
    assert harness.cached[2, 0] == 8


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


def test_a_preempted_sequence_does_not_lose_its_place_to_the_queue_timeout():
    now = [0.0]
    harness = Harness(limits(num_pages=9, max_sequence_tokens=32), lookahead=1, clock=lambda: now[0])
    asked = [request(index, prompt=(index, 5), max_tokens=22, queue_timeout_s=5) for index in range(3)]
    for one in asked:
        harness.add(one)
    while not harness.scheduler.counters.preemptions:
        harness.step()
    now[0] = 6.0
    harness.run()
    assert not harness.failures
    for one in asked:
        assert harness.tokens[one.request_id, 0] == expected_tokens(one)


def test_nobody_starts_where_the_next_page_of_another_would_end_it():
    harness = Harness(limits(num_pages=9, max_sequence_tokens=32))
    harness.add(request(1, prompt=(1, 2, 3), max_tokens=6))
    harness.step()
    harness.add(request(2, prompt=tuple(range(10, 36)), max_tokens=2))
    harness.step()
    assert harness.scheduler.blocked_by == "pages"
    harness.run()
    assert harness.scheduler.counters.preemptions == 0
