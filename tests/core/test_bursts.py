"""Several tokens of each sequence in one step, while nobody could join them."""

from quire.core.plan import StepResult
from quire.core.stats import Blocker
from quire.request import FinishReason, Grammar, GrammarKind
from tests.core.harness import Harness, limits, request
from tests.fake_executor import expected_tokens


def lengths(plan) -> list[int]:
    return [chunk.length for chunk in plan.chunks]


def test_decodes_get_several_tokens_while_no_sequence_waits():
    harness = Harness(limits(max_burst=4))
    asked = request(1, max_tokens=9)
    harness.add(asked)
    harness.step()
    plan = harness.plan()
    assert plan.burst == 4
    assert lengths(plan) == [4]
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)


def test_no_more_tokens_are_planned_than_a_request_may_have():
    harness = Harness(limits(max_burst=4))
    harness.add(request(1, max_tokens=4))
    harness.add(request(2, max_tokens=9))
    harness.step()
    assert lengths(harness.plan()) == [3, 4]


def test_a_sequence_that_waits_for_a_free_slot_joins_in_the_next_step():
    harness = Harness(limits(max_burst=4))
    harness.add(request(1, max_tokens=30))
    harness.step()
    harness.add(request(2, max_tokens=30))
    plan = harness.plan()
    assert plan.burst == 1
    assert len(plan.started) == 1


def test_sequences_that_wait_for_a_slot_do_not_hold_up_the_others():
    harness = Harness(limits(max_burst=4, max_batch_size=1))
    harness.add(request(1, max_tokens=30))
    harness.add(request(2, max_tokens=30))
    harness.step()
    assert harness.plan().burst == 4
    assert harness.scheduler.blocked_by is Blocker.SLOTS


def test_a_prompt_that_is_not_computed_yet_gets_its_steps():
    harness = Harness(limits(max_burst=4, max_batch_prefill_tokens=4))
    harness.add(request(1, prompt=(1,), max_tokens=30))
    harness.add(request(2, prompt=tuple(range(12)), max_tokens=30))
    plans = []
    for _ in range(4):
        plans.append(harness.plan())
        harness.complete()
    assert [plan.burst for plan in plans] == [1, 1, 1, 1]
    assert harness.plan().burst == 4


def test_a_grammar_sees_every_token_before_the_next():
    harness = Harness(limits(max_burst=4))
    harness.add(request(1, max_tokens=30, end_ids=(3,), grammar=Grammar(GrammarKind.REGEX, "a*")))
    harness.step()
    assert harness.plan().burst == 1


def test_a_plan_names_the_chunks_that_sample_under_a_grammar():
    harness = Harness(limits(max_batch_prefill_tokens=8))
    grammar = Grammar(GrammarKind.REGEX, "a*")
    harness.add(request(1, max_tokens=30))
    harness.add(request(2, max_tokens=30, end_ids=(49,), grammar=grammar))
    harness.add(request(3, prompt=tuple(range(9)), max_tokens=30, end_ids=(49,), grammar=grammar))
    plans = [harness.plan()]
    harness.complete()
    plans.append(harness.plan())
    assert [(plan.guided, [chunk.request_id for chunk in plan.chunks]) for plan in plans] == [
        ((1,), [1, 2, 3]),  # a part of a prompt samples nothing
        ((1, 2), [1, 2, 3]),
    ]


def test_the_step_budget_can_forbid_bursts():
    harness = Harness(limits(max_burst=4))
    harness.add(request(1, max_tokens=30))
    harness.scheduler.budget.burst = 1
    harness.step()
    assert harness.plan().burst == 1


def test_what_was_computed_beyond_the_end_is_not_shared():
    """The answer ends within the first burst; its page is full on the device, but not with known tokens."""
    prompt = (1, 2, 3, 4, 5)
    asked = request(1, prompt=prompt, max_tokens=11)
    stop = expected_tokens(asked)[1]
    asked = request(1, prompt=prompt, max_tokens=11, stop_ids=(stop,))
    harness = Harness(limits(max_burst=4))
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)
    assert harness.finished[1, 0] is FinishReason.STOP_TOKEN
    assert harness.scheduler.stats().cached_pages == 1  # positions 4 to 7 are not all known


def test_a_row_that_fails_after_its_end_has_not_failed():
    harness = Harness(limits(max_burst=4))
    asked = request(1, max_tokens=30, stop_ids=(7,))
    harness.add(asked)
    harness.step()
    plan = harness.scheduler.plan()
    updates, failures = harness.scheduler.complete(StepResult(plan.step, [[5, 7, 9]], failed={0: "not numbers"}))
    assert [update.tokens for update in updates] == [[5, 7]]
    assert not failures


def test_a_row_that_fails_in_the_middle_has_failed():
    harness = Harness(limits(max_burst=4))
    harness.add(request(1, max_tokens=30))
    harness.step()
    plan = harness.scheduler.plan()
    updates, failures = harness.scheduler.complete(StepResult(plan.step, [[5, 7]], failed={0: "not numbers"}))
    assert not updates
    assert [failure.request_id for failure in failures] == [1]
    assert harness.scheduler.stats().free_pages + harness.scheduler.stats().cached_pages == 32


def test_no_sequence_loses_its_slot_for_tokens_that_could_come_later():
    """Two sequences, and a page short of what two bursts would take."""
    harness = Harness(limits(max_burst=4, num_pages=4))
    harness.add(request(1, prompt=(1, 2, 3), max_tokens=3))
    harness.add(request(2, prompt=(4, 5, 6), max_tokens=9))
    harness.step()
    assert lengths(harness.plan()) == [1 + 1, 1]
    assert harness.scheduler.counters.preemptions == 0
