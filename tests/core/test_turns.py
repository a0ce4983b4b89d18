"""The order in which prompts start: short ones pass long ones, within a bound."""

from quire.core.queue import PATIENCE
from tests.core.harness import Harness, limits, request
from tests.core.test_scheduler import LONG, prefilled
from tests.fake_executor import expected_tokens


def test_a_long_prompt_that_others_pass_keeps_a_share():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, max_batch_size=8, short_prompt=0))
    harness.add(request(1, prompt=LONG, max_tokens=2))
    assert prefilled(harness.plan()) == {1: 16}
    harness.complete()
    for request_id in (2, 3, 4):
        harness.add(request(request_id, prompt=tuple(range(request_id, request_id + 6)), max_tokens=2))
    steps = []
    for _ in range(2):
        steps.append(prefilled(harness.plan()))
        harness.complete()
    assert steps == [{1: 4, 2: 6, 3: 6}, {1: 8, 4: 6}], "a quarter of 16 is for the long one"
    harness.run()
    assert list(harness.finished) == [(2, 0), (3, 0), (4, 0), (1, 0)]


def test_one_that_loses_its_slot_passes_a_long_prompt_in_the_same_step():
    """It has its turn before the long one, which keeps a quarter. As it does not fit into the rest, another starts."""
    harness = Harness(limits(num_pages=31, max_sequence_tokens=200, max_batch_size=2, max_step_tokens=24,
                             prefix_caching=False, short_prompt=0))  # fmt: skip
    harness.add(request(1, prompt=LONG, max_tokens=2))
    harness.step()
    harness.add(request(2, prompt=LONG[:12], max_tokens=60))
    harness.step()
    harness.add(request(3, prompt=LONG[:8], max_tokens=2, priority=1))
    harness.scheduler.budget.max_prefill_beside_decodes = 1
    while not harness.scheduler.counters.preemptions:
        plan = harness.plan()
        harness.complete()
    assert prefilled(plan) == {1: 8, 3: 8}
    harness.run()
    assert list(harness.finished) == [(3, 0), (1, 0), (2, 0)]


def test_one_that_waited_in_vain_passes_a_long_prompt_in_the_same_step():
    """The second waits for a snapshot of the first, and there is one, which the step in flight writes."""
    harness = Harness(limits(num_pages=200, max_batch_size=8, max_step_tokens=40, max_batch_prefill_tokens=27,
                             snapshots=1, snapshot_tokens=0), lookahead=1)  # fmt: skip
    for request_id in (1, 2):
        harness.add(request(request_id, prompt=LONG[:33]))
    assert prefilled(harness.plan()) == {1: 24}
    running = harness.scheduler._running
    for request_id, length in ((3, 5), (4, 60)):  # they start as where a share was too small for them
        harness.add(request(request_id, prompt=tuple(range(50 * request_id, 50 * request_id + length))))
        (sequence,) = harness.scheduler._requests.sequences(request_id)
        running.start(sequence, running.match(sequence), 1)
    for request_id, length in ((5, 12), (6, 4)):
        harness.add(request(request_id, prompt=tuple(range(50 * request_id, 50 * request_id + length))))
    assert prefilled(harness.plan()) == {1: 8, 3: 4, 5: 8, 6: 4, 4: 3}, "of 15 a quarter is for the long one"
    harness.run()


def test_shorter_prompts_pass_a_long_one_until_it_is_due():
    """It is due when 64 times its tokens have arrived after it."""
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, max_batch_size=1, max_batch_prefill_tokens=32,
                             short_prompt=0))  # fmt: skip
    harness.add(request(1, prompt=(90, 91), max_tokens=2))
    harness.step()
    harness.add(request(2, prompt=tuple(range(4)), max_tokens=1))
    for number in range(200):
        harness.add(request(3 + number, prompt=(50 + number, 1), max_tokens=1))
    harness.run()
    num_before = list(harness.finished).index((2, 0)) - 1  # it is 2 tokens longer, and those after it have 2 each
    assert 4 + 2 * num_before == PATIENCE * 2, "as many tokens as arrive before it is due"


def test_what_a_prompt_finds_in_the_cache_does_not_make_it_long():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, max_batch_size=1, max_batch_prefill_tokens=32,
                             short_prompt=0))  # fmt: skip
    harness.add(request(1, prompt=LONG, max_tokens=1))
    harness.run()
    harness.add(request(2, prompt=(90, 91), max_tokens=2))
    harness.step()
    harness.add(request(3, prompt=tuple(range(200, 210)), max_tokens=1))
    harness.add(request(4, prompt=(*LONG, 7), max_tokens=1))
    harness.run()
    assert list(harness.finished)[1:] == [(2, 0), (4, 0), (3, 0)]


def test_what_ran_before_comes_before_shorter_prompts():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, max_batch_size=1, max_batch_prefill_tokens=32,
                             short_prompt=0))  # fmt: skip
    harness.add(request(1, prompt=LONG[:40], max_tokens=3))
    harness.step()
    harness.add(request(2, prompt=(90, 91), max_tokens=1))
    harness.lose_everything()
    harness.run()
    assert list(harness.finished) == [(1, 0), (2, 0)]


def test_prompts_that_are_short_start_in_the_order_in_which_they_came():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, max_batch_size=1, max_batch_prefill_tokens=32))
    for request_id, length in enumerate((60, 3, 30, 1), start=1):
        harness.add(request(request_id, prompt=LONG[:length], max_tokens=1))
    harness.run()
    assert list(harness.finished) == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_what_waits_gets_its_share_before_longer_ones_that_run():
    """The first of those that run leaves three quarters to those before it, not to the next one that runs."""
    harness = Harness(limits(page_size=16, num_pages=1500, max_sequence_tokens=20_000, max_batch_size=16,
                             max_step_tokens=8300, max_batch_prefill_tokens=8192, short_prompt=0))  # fmt: skip
    harness.scheduler.budget.max_prefill_beside_decodes = 64
    harness.add(request(1, prompt=(1, 2), max_tokens=900))
    harness.step()
    for request_id, length in ((2, 16_000), (3, 1500)):
        harness.add(request(request_id, prompt=tuple(range(request_id * 20_000, request_id * 20_000 + length))))
        harness.step()
    assert len(harness.scheduler._running.prefilling) == 2
    for request_id in (4, 5):
        harness.add(request(request_id, prompt=tuple(range(request_id * 1000, request_id * 1000 + 40))))
    assert [prefilled(harness.plan()), harness.complete(), prefilled(harness.plan())][::2] == [
        {3: 24, 4: 40},
        {3: 24, 5: 40},
    ]


def test_samples_of_a_long_prompt_are_looked_for_once():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, short_prompt=0))
    harness.add(request(1, prompt=LONG, max_tokens=1))
    harness.run()
    harness.add(request(2, prompt=(*LONG, 7), max_tokens=2, samples=3))
    first, *others = harness.scheduler._requests.sequences(2)
    assert all(one.match.path == first.match.path and one.match.path is not first.match.path for one in others)
    harness.run()
    assert {key for key in harness.finished if key[0] == 2} == {(2, 0), (2, 1), (2, 2)}


def test_no_prompt_is_preempted_that_is_in_the_step():
    """Pages get short while several prompts run, and an older one comes after a younger that ends in the step."""
    harness = Harness(limits(page_size=2, num_pages=118, max_batch_size=16, max_step_tokens=120, short_prompt=0,
                             max_batch_prefill_tokens=96, max_sequence_tokens=100))  # fmt: skip
    harness.scheduler.budget.max_prefill_beside_decodes = 6
    arrivals = {1: [1], 2: [1], 3: [1], 5: [22, 25, 16], 7: [13], 9: [11], 17: [10], 20: [17]}  # tokens, by step
    number = 0
    for step in range(80):
        for length in arrivals.get(step, []):
            number += 1
            harness.add(request(number, prompt=tuple(range(100 * number, 100 * number + length)), max_tokens=30))
        harness.step()
    harness.run()


def test_prompts_that_run_go_on_in_their_turn():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, max_batch_size=8, max_step_tokens=24,
                             short_prompt=0))  # fmt: skip
    harness.add(request(1, prompt=LONG, max_tokens=2))
    harness.step()
    harness.add(request(2, prompt=LONG[3:23], max_tokens=2))
    harness.scheduler._planner._running.start(  # as where a share was too small for it
        sequence := harness.scheduler._requests.sequences(2)[0], harness.scheduler._running.match(sequence), 1
    )
    harness.scheduler._queue.leave(sequence)
    assert prefilled(harness.plan()) == {1: 4, 2: 12}, "its turn is first, though it is younger"


def test_what_ran_elsewhere_comes_before_shorter_prompts():
    harness = Harness(limits(num_pages=200, max_sequence_tokens=200, max_batch_size=1, max_batch_prefill_tokens=32,
                             short_prompt=0))  # fmt: skip
    asked = request(1, prompt=LONG[:40], max_tokens=3)
    harness.add(request(2, prompt=(90, 91), max_tokens=1))
    harness.scheduler.add(asked, so_far=[expected_tokens(asked)[:1]])
    harness.run()
    assert list(harness.finished) == [(1, 0), (2, 0)]
