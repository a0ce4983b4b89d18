"""Sharing between sequences: pages of equal prefixes, and the work of computing them."""

import pytest

from quire.core.plan import Kind
from quire.core.prompt_planner import MAX_PARKED_TOKENS
from quire.core.requests import LONG_SALT
from quire.core.scheduler import Scheduler
from quire.core.stats import Blocker
from quire.request import FinishReason
from tests.core.harness import Harness, limits, request
from tests.core.operations import operations
from tests.fake_executor import expected_prompt_logprobs, expected_tokens


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
    assert (plan.chunks[0].start, plan.chunks[0].length) == (7, 1)
    ((pages,),) = (chunk.new_pages for chunk in plan.chunks)
    assert [copy.target.page for copy in plan.copies] == [pages[1]], "the last page is its own"


def test_a_page_that_begins_alike_is_copied_and_continued():
    harness = Harness(limits(), lookahead=1)
    first = request(1, prompt=tuple(range(12)), max_tokens=3)
    harness.add(first)
    harness.run()
    asked = [
        request(2, prompt=(*range(7), 40, 41, 42), max_tokens=6),
        request(3, prompt=(0, 1, 40, 41), max_tokens=6),
        request(4, prompt=(0, 40, 41, 42, 43), max_tokens=6),  # one token is less than half a page
    ]
    for one in asked:
        harness.add(one)
    plan = harness.plan()
    assert [chunk.start for chunk in plan.chunks] == [7, 2, 0]
    assert len(plan.copies) == 2
    harness.run()
    assert [harness.tokens[one.request_id, 0] for one in asked] == [expected_tokens(one) for one in asked]
    assert [harness.cached[one.request_id, 0] for one in asked] == [7, 2, 0]


def test_a_prompt_that_is_to_be_scored_is_computed_whole():
    harness = Harness(limits())
    prompt = tuple(range(12))
    harness.add(request(1, prompt=prompt, max_tokens=1))
    harness.run()
    scored = request(2, prompt=prompt, max_tokens=1, prompt_logprobs=1)
    harness.add(scored)
    plan = harness.plan()
    assert (plan.chunks[0].start, plan.copies) == (0, ())
    harness.run()
    assert harness.prompt_logprobs[2, 0] == expected_prompt_logprobs(scored)


def test_where_pages_are_short_nothing_is_copied():
    """Beside the page to copy there is none to copy to: it goes instead."""
    harness = Harness(limits(num_pages=2))
    harness.add(request(1, prompt=(0, 1, 2, 3), max_tokens=0))
    harness.run()
    harness.add(request(2, prompt=(0, 1, 2, 40), max_tokens=0))
    plan = harness.plan()
    assert (plan.chunks[0].start, plan.copies) == (0, ())
    harness.run()
    assert harness.finished[2, 0] is FinishReason.LENGTH


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
    assert (harness.cached[2, 0], harness.cached[3, 0]) == (0, 11)


def test_a_long_salt_takes_little_memory_though_its_pages_stay():
    harness = Harness(limits())
    prompt, long = tuple(range(12)), "x" * 100_000
    for request_id, salt in enumerate((f"{long}a", f"{long}b", f"{long}a"), start=1):
        harness.add(request(request_id, prompt=prompt, max_tokens=1, salt=salt))
        harness.run()
    assert [harness.cached[request_id, 0] for request_id in (1, 2, 3)] == [0, 0, 11]
    roots = harness.scheduler._running.cache._roots
    assert len(roots) == 2
    assert all(len(salt) <= LONG_SALT for salt in roots)


def test_prompts_whose_positions_are_computed_differently_share_nothing():
    harness = Harness(limits(), prefix_key=lambda length: int(length > 12))
    for request_id, length in ((1, 12), (2, 13), (3, 11), (4, 14)):
        harness.add(request(request_id, prompt=tuple(range(length)), max_tokens=1))
        harness.run()
    assert [harness.cached[request_id, 0] for request_id in (1, 2, 3, 4)] == [0, 0, 10, 12]


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
    prefill = sum(c.length for plan in harness.executor.plans for c in plan.chunks if c.kind is Kind.PREFILL)
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
    chunks = [chunk for plan in harness.executor.plans for chunk in plan.chunks]
    shared = {chunk.new_pages[0][:2] for chunk in chunks if chunk.kind is Kind.PREFILL}
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
    assert harness.scheduler.stats().cached_pages == 0


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
    assert harness.cached[4, 0] == 11
    assert harness.cached[5, 0] == 4


def test_prompt_logprobs_are_complete_although_the_prefix_is_cached():
    harness = Harness(limits())
    for request_id in (1, 2):
        asked = request(request_id, prompt=tuple(range(10)), prompt_logprobs=1)
        harness.add(asked)
        harness.run()
        assert harness.prompt_logprobs[request_id, 0] == expected_prompt_logprobs(asked)


def test_a_long_line_for_one_prefix_is_not_looked_through_in_one_step():
    harness = Harness(limits(max_batch_size=4, num_pages=64))
    for request_id in range(40):
        harness.add(request(request_id, prompt=(*range(12), request_id), max_tokens=2))
    harness.plan()
    assert harness.scheduler.blocked_by is Blocker.SHARED_PREFIX
    harness.run()
    prefill = sum(c.length for plan in harness.executor.plans for c in plan.chunks if c.kind is Kind.PREFILL)
    assert prefill == 13 + 39 * 1


def test_those_that_wait_for_one_prefix_cost_nothing_until_it_is_there():
    costs = []
    for num_waiting in (2, 30):
        chosen = limits(max_batch_size=32, max_step_tokens=40, max_batch_prefill_tokens=8, num_pages=64)
        harness = Harness(chosen)
        for request_id in range(1 + num_waiting):
            harness.add(request(request_id, prompt=(*range(40), request_id), max_tokens=2))
        harness.step()  # they are parked
        plans = []
        for _ in range(3):  # the fifth chunk has the last of the pages that they wait for
            costs.append(operations(lambda plans=plans, harness=harness: plans.append(harness.scheduler.plan())))
            result = harness.executor.submit(plans[-1]).result()
            costs.append(operations(lambda harness=harness, result=result: harness.scheduler.complete(result)))
        assert harness.scheduler.num_waiting == num_waiting
        harness.run()
    assert max(costs[6:]) < 1.1 * max(costs[:6])


def test_those_that_share_less_of_a_prompt_start_sooner():
    harness = Harness(limits(max_batch_prefill_tokens=8, num_pages=64, max_step_tokens=40))
    prompt = tuple(range(40))
    for request_id, shared in ((1, 40), (2, 32), (3, 8), (4, 20)):
        harness.add(request(request_id, prompt=(*prompt[:shared], 40 + request_id), max_tokens=1))
    harness.run()
    first = {chunk.request_id: chunk.start for plan in reversed(harness.executor.plans) for chunk in plan.chunks}
    started = [len(start.prompt) for plan in harness.executor.plans for start in plan.started]
    assert first == {1: 0, 2: 32, 3: 8, 4: 20}
    assert started == [41, 9, 21, 33]


def test_one_that_goes_on_otherwise_starts_when_the_pages_before_are_there():
    harness = Harness(limits(max_batch_prefill_tokens=20, max_step_tokens=40, num_pages=64, max_sequence_tokens=80))
    harness.add(request(1, prompt=(*range(45), *range(15)), max_tokens=1))
    harness.add(request(2, prompt=(*range(20), *range(30, 35)), max_tokens=1))  # a whole page is its own
    harness.step()
    assert harness.scheduler.num_running == 1
    starts = {chunk.request_id: chunk.start for chunk in harness.plan().chunks}
    assert starts == {1: 20, 2: 20}
    harness.run()


def test_the_end_of_a_prompt_that_is_under_way_is_not_computed_twice():
    harness = Harness(limits(max_batch_prefill_tokens=8), lookahead=1)
    for request_id in (1, 2):
        harness.add(request(request_id, prompt=(*range(20), request_id), max_tokens=2))
    harness.run()
    prefill = sum(c.length for plan in harness.executor.plans for c in plan.chunks if c.kind is Kind.PREFILL)
    assert prefill == 21 + 1


def test_a_step_compares_a_bounded_number_of_tokens_of_those_that_wait_for_a_prefix():
    length = MAX_PARKED_TOKENS // 2 + 2
    chosen = limits(page_size=1024, num_pages=1024, max_sequence_tokens=length + 1)
    scheduler = Scheduler(chosen, lambda: 0.0)
    for request_id in range(4):
        scheduler.add(request(request_id, prompt=tuple(range(length)), max_tokens=1))
    scheduler.plan()
    assert scheduler.blocked_by is Blocker.SHARED_PREFIX
    scheduler.plan()
    assert scheduler.blocked_by is not Blocker.SHARED_PREFIX


def test_any_text_can_be_a_salt():
    harness = Harness(limits())
    for request_id in (1, 2):
        harness.add(request(request_id, prompt=tuple(range(9)), salt="\ud800"))
        harness.run()
    assert harness.cached[2, 0] == 8
