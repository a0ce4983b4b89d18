"""Admission: requests that are admitted, that wait and for how long, and that are refused."""

import tracemalloc

import pytest

from quire.core.stats import Blocker
from quire.errors import DeadlineExceeded, InvalidRequest, Overloaded, PromptTooLong
from quire.request import FinishReason
from tests.core.harness import Harness, limits, request
from tests.fake_executor import expected_tokens


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


def test_a_place_is_kept_for_a_client_that_retries_on_time_and_none_where_no_client_waits():
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
    with pytest.raises(Overloaded, match="2 sequences wait and 2 places are kept for clients that retry"):
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
        (tuple(range(30)), 4, "they take 9 pages, the cache holds 8"),
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


def test_under_a_ratio_that_no_queue_reaches_admissions_wait_for_steps_to_pass():
    harness = Harness(limits(max_batch_size=8, waiting_served_ratio=float("inf"), max_waiting_tokens=5))
    harness.add(request(1, max_tokens=20))
    harness.step()
    harness.add(request(2, prompt=(40, 1), max_tokens=2))
    waited = 0
    while harness.scheduler.num_waiting:
        harness.step()
        waited += 1
    assert waited == 5


def test_the_rule_by_which_sequences_join_others_is_counted():
    harness = Harness(limits(max_batch_size=8, waiting_served_ratio=1.0, max_waiting_tokens=5))
    joined_by = harness.scheduler.counters.joined_by
    for request_id in range(4):
        harness.add(request(request_id, prompt=(request_id, 1), max_tokens=20))
    harness.step()
    assert joined_by == {"backpressure": 0, "wait_exceeded": 0, "chunking": 0}, "no other sequence ran"
    harness.add(request(10, prompt=(40, 1), max_tokens=2))
    while harness.scheduler.num_waiting:
        harness.step()
    assert joined_by == {"backpressure": 0, "wait_exceeded": 1, "chunking": 0}
    for request_id in range(20, 25):
        harness.add(request(request_id, prompt=(request_id, 1), max_tokens=2))
    harness.step()
    assert joined_by == {"backpressure": 1, "wait_exceeded": 1, "chunking": 0}


@pytest.mark.parametrize("rule", [{}, {"waiting_served_ratio": 0.3}, {"max_waiting_tokens": 20}])
def test_sequences_that_join_others_without_a_wait_are_counted_as_such(rule):
    harness = Harness(limits(max_batch_prefill_tokens=4, **rule))
    harness.add(request(1, max_tokens=20))
    harness.step()
    harness.add(request(2, prompt=tuple(range(10, 30)), max_tokens=2))
    for _ in range(3):
        harness.step()
    assert harness.scheduler.counters.joined_by == {"backpressure": 0, "wait_exceeded": 0, "chunking": 1}
    harness.run()


def test_the_batch_has_a_bound_on_its_total_tokens():
    harness = Harness(limits(max_batch_total_tokens=30, max_sequence_tokens=30))
    for request_id in range(3):
        harness.add(request(request_id, prompt=(1, 2), max_tokens=10))
    harness.step()
    assert harness.scheduler.num_running == 2
    assert harness.scheduler.blocked_by is Blocker.TOTAL_TOKENS
    harness.run()


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


def test_no_sequence_is_admitted_past_a_prefill_that_is_short_of_pages():
    harness = Harness(limits(num_pages=11, max_sequence_tokens=40, max_batch_prefill_tokens=2))
    decode = request(1, prompt=(1, 2, 3), max_tokens=33)
    harness.add(decode)
    harness.step()
    harness.add(request(2, prompt=tuple(range(10, 42)), max_tokens=1))
    while harness.scheduler.blocked_by is not Blocker.PAGES:
        harness.step()
        assert harness.scheduler.num_requests == 2
    assert harness.scheduler.num_running == 2
    harness.add(request(3, prompt=(7,), max_tokens=2))
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(decode)
    assert list(harness.finished) == [(1, 0), (2, 0), (3, 0)]


def test_no_sequence_takes_the_pages_that_the_rest_of_a_prompt_needs():
    harness = Harness(limits(num_pages=9, max_sequence_tokens=32))
    harness.add(request(1, prompt=tuple(range(28)), max_tokens=2))
    harness.add(request(2, prompt=(40, 41, 42, 43), max_tokens=1))
    plan = harness.plan()
    assert [chunk.request_id for chunk in plan.chunks] == [1]
    assert harness.scheduler.blocked_by is Blocker.PAGES
    harness.run()
    assert harness.scheduler.counters.preemptions == 0


def test_a_request_for_too_many_samples_is_refused():
    harness = Harness(limits())
    with pytest.raises(InvalidRequest, match="samples is 1000000000; the limit is 128"):
        harness.add(request(1, samples=10**9))


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


def test_no_sequence_starts_where_the_next_page_of_another_would_end_it():
    harness = Harness(limits(num_pages=9, max_sequence_tokens=32))
    harness.add(request(1, prompt=(1, 2, 3), max_tokens=6))
    harness.step()
    harness.add(request(2, prompt=tuple(range(10, 36)), max_tokens=2))
    harness.step()
    assert harness.scheduler.blocked_by is Blocker.PAGES
    harness.run()
    assert harness.scheduler.counters.preemptions == 0


def test_a_long_prompt_is_not_kept_twice_while_it_waits() -> None:
    harness = Harness(limits(max_batch_size=1, max_sequence_tokens=20_000, num_pages=6000, max_batch_prefill_tokens=8))
    harness.add(request(1, max_tokens=8))
    harness.step()
    waiting = request(2, prompt=tuple(range(1000, 11_000)), max_tokens=1)
    tracemalloc.start()
    try:
        harness.scheduler.add(waiting)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 8 * len(waiting.prompt) / 4
    assert harness.scheduler.num_waiting == 1
