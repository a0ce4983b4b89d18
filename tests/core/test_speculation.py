"""Guesses of the next tokens: they change no token, and are made where they pay."""

import random
from itertools import pairwise

import pytest

from quire.core.limits import Limits
from quire.core.plan import Kind, StepPlan, StepResult
from quire.core.sequence import Sequence
from quire.core.speculation import LATE, LONGER, MAX_PAUSE, MIN_PAUSE, Speculation
from quire.core.stats import Counters
from quire.core.step_budget import StepBudget
from quire.request import FinishReason, Grammar, GrammarKind, SamplingParams
from tests.core.harness import Harness, limits, request
from tests.fake_executor import expected_tokens


def guesses(plan: StepPlan) -> dict[int, int]:
    return {chunk.request_id: chunk.length - 1 for chunk in plan.chunks if chunk.kind is Kind.VERIFY}


def running(number: int, max_tokens: int) -> Sequence:
    sequence = Sequence(number, request(number, max_tokens=max_tokens), 0, "")
    sequence.own_tokens()
    return sequence


def speculating(percent: int = 100, lookahead: int = 0, **changes: object) -> Harness:
    changes = {"page_size": 8, "max_guesses": 4, "max_batch_prefill_tokens": 24, "max_step_tokens": 40} | changes
    return Harness(limits(**changes), lookahead, guess_percent=percent)


def test_right_guesses_are_several_tokens_of_one_step():
    harness = speculating()
    asked = request(1, max_tokens=30)
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)
    counters = harness.scheduler.counters
    assert counters.right_guesses == counters.guesses > 15
    assert counters.steps == 30 - counters.right_guesses


def test_wrong_guesses_change_no_token_and_are_soon_not_made():
    harness = speculating(percent=0)
    asked = request(1, max_tokens=50)
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)
    counters = harness.scheduler.counters
    assert counters.right_guesses == 0
    assert counters.steps == 50
    assert 3 < counters.guesses < 20


def test_the_next_step_is_planned_before_it_is_known_how_many_guesses_were_right():
    for percent in (0, 60, 100):
        harness = speculating(percent, lookahead=2)
        asked = request(1, max_tokens=40)
        harness.add(asked)
        harness.step()
        harness.plan(), harness.plan()
        assert len(harness.in_flight) == 3
        assert [guesses(plan).get(1, 0) > 0 for plan, _ in harness.in_flight] == [True] * 3
        starts = [plan.chunks[0].start for plan, _ in harness.in_flight]
        lengths = [plan.chunks[0].length for plan, _ in harness.in_flight]
        assert [start + length for start, length in zip(starts, lengths, strict=True)][:2] == starts[1:]
        harness.run()
        assert harness.tokens[1, 0] == expected_tokens(asked)


def test_no_position_is_planned_beyond_the_last_that_a_request_may_have():
    harness = speculating(lookahead=2)
    harness.add(request(1, max_tokens=9))
    plans = []
    while harness.scheduler.num_requests:
        while (plan := harness.plan()) is not None:
            plans.append(plan)
        harness.complete()
    assert max(chunk.start + chunk.length for plan in plans for chunk in plan.chunks) == 3 + 9 - 1


def test_rows_that_guess_share_a_step_with_rows_that_do_not_and_with_prompts():
    harness = speculating()
    grammar = Grammar(GrammarKind.REGEX, "a*")
    harness.add(request(1, max_tokens=30))
    harness.add(request(2, max_tokens=30, end_ids=(49,), grammar=grammar))
    harness.step()
    harness.add(request(3, prompt=tuple(range(20)), max_tokens=4))
    plan = harness.plan()
    assert [(chunk.request_id, chunk.kind) for chunk in plan.chunks] == [
        (2, Kind.DECODE),
        (1, Kind.VERIFY),
        (3, Kind.PREFILL),
    ]
    harness.run()


def test_nothing_is_guessed_under_a_grammar():
    harness = speculating()
    harness.add(request(1, max_tokens=30, end_ids=(49,), grammar=Grammar(GrammarKind.REGEX, "a*")))
    harness.run()
    assert harness.scheduler.counters.guesses == 0


def test_nothing_is_guessed_during_a_search_for_a_culprit():
    harness = speculating()
    harness.add(request(1, max_tokens=30))
    harness.step()
    harness.scheduler.focus([1])
    assert not guesses(harness.plan())
    harness.complete()
    harness.scheduler.focus(None)
    assert guesses(harness.plan())


def test_an_answer_ends_in_the_middle_of_right_guesses():
    asked = request(1, max_tokens=30)
    answer = expected_tokens(asked)
    stop = next(token for token in answer if answer.index(token) > 6)
    asked = request(1, max_tokens=30, stop_ids=(stop,))
    harness = speculating()
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)
    assert harness.finished[1, 0] is FinishReason.STOP_TOKEN
    # Positions beyond the end are computed, but not shared.
    stats = harness.scheduler.stats()
    assert stats.cached_pages == (len(asked.prompt) + len(harness.tokens[1, 0]) - 1) // 8


def test_an_update_tells_how_many_guesses_were_right():
    harness = speculating()
    asked = request(1, max_tokens=30, stop_ids=(7,))
    harness.add(asked)
    harness.step()
    plan = harness.scheduler.plan()
    assert guesses(plan)[1] >= 2
    updates, _ = harness.scheduler.complete(StepResult(plan.step, [[5, 7, 9]]))
    assert [(update.tokens, update.guesses) for update in updates] == [([5, 7], (guesses(plan)[1], 1))]


def test_log_probabilities_come_with_every_token():
    harness = speculating(percent=70)
    asked = request(1, max_tokens=30, sampling=SamplingParams(logprobs=1))
    harness.add(asked)
    harness.run()
    assert [one.top_ids[0] for one in harness.logprobs[1, 0]] == harness.tokens[1, 0] == expected_tokens(asked)


def test_no_sequence_is_preempted_for_guesses():
    """Pages for both answers, and none to spare."""
    harness = speculating(percent=50, lookahead=1, num_pages=5)
    for number in (1, 2):
        harness.add(request(number, prompt=(number, 2, 3), max_tokens=13))
    harness.run()
    assert harness.scheduler.counters.preemptions == 0
    assert harness.scheduler.counters.guesses > 0


def test_a_sequence_that_is_short_of_a_page_for_its_guesses_makes_fewer():
    """Two sequences, and a page short of what the guesses of both would take."""
    harness = Harness(limits(max_guesses=3, num_pages=4), guess_percent=100)
    harness.add(request(1, prompt=(1, 2, 3), max_tokens=3))
    harness.add(request(2, prompt=(4, 5, 6), max_tokens=9))
    harness.step()
    assert [chunk.length for chunk in harness.plan().chunks] == [1, 2]
    assert harness.scheduler.counters.preemptions == 0
    harness.run()


def test_guesses_take_their_tokens_from_those_of_prompts():
    harness = speculating(max_step_tokens=12, max_batch_prefill_tokens=12)
    harness.add(request(1, max_tokens=30))
    harness.step()
    harness.add(request(2, prompt=tuple(range(30)), max_tokens=4))
    plan = harness.plan()
    assert guesses(plan)[1] > 1
    assert plan.num_tokens == 12
    harness.run()


def test_pages_taken_for_guesses_that_were_wrong_are_used_by_the_next_tokens():
    harness = speculating(percent=0)
    harness.add(request(1, prompt=(1, 2, 3, 4, 5), max_tokens=20))
    harness.step()
    plan = harness.plan()
    assert plan.chunks[0].start + plan.chunks[0].length > 8
    assert plan.chunks[0].new_pages
    harness.complete()
    while harness.plan().chunks[0].start + 1 < 16:
        assert not any(plan.chunks[0].new_pages for plan, _ in harness.in_flight)
        harness.complete()
    harness.run()


# The choice


def chooser(fixed: float = 20.0, sizes: tuple[int, ...] = (), slots: int = 32) -> Speculation:
    chosen = Limits(16, 1000, slots, 600, 512, 4096, max_guesses=7)
    budget = StepBudget(chosen)
    budget.fixed_tokens, budget.padded_sizes = fixed, sizes
    return Speculation(chosen, budget, Counters())


def decoding(speculation: Speculation, count: int, chance: float) -> list[Sequence]:
    sequences = [running(number, 1000) for number in range(count)]
    for sequence in sequences:
        speculation.begin(sequence)
        sequence.guessing.chance = sequence.guessing.mean = chance
        sequence.guessing.next_try = 10**9
    return sequences


def chosen(speculation: Speculation, sequences: list[Sequence]) -> list[int]:
    found = speculation.choose(sequences, len(sequences))
    return [found.get(sequence.id, 0) for sequence in sequences]


def test_more_guesses_are_made_where_more_are_right():
    speculation = chooser()
    counts = [chosen(speculation, decoding(speculation, 1, chance))[0] for chance in (0.0, 0.1, 0.3, 0.6, 0.95)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 7)


def test_fewer_guesses_are_made_beside_more_rows_and_none_in_a_full_batch():
    speculation = chooser()
    counts = [max(chosen(speculation, decoding(speculation, rows, 0.6))) for rows in (1, 4, 8, 32)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0] > 3, counts[-1]) == (True, 0)


def test_a_full_batch_guesses_where_nearly_all_guesses_are_right():
    speculation = chooser()
    assert sum(chosen(speculation, decoding(speculation, 32, 0.99))) == 56  # the most of one step


def test_no_guess_is_made_whose_padding_costs_more_than_it_gives():
    speculation = chooser(sizes=(1, 2, 4, 8, 16, 24, 32, 64))
    sequences = decoding(speculation, 8, 0.0)
    sequences[0].guessing.chance = 0.4  # one token for the cost of eight
    assert sum(chosen(speculation, sequences)) == 0
    assert sum(chosen(chooser(), sequences)) > 0
    for sequence in sequences:
        sequence.guessing.chance = 0.9
    assert sum(chosen(speculation, sequences)) + 8 in (16, 24, 32, 64)  # steps are filled


def test_a_sequence_that_made_none_tries_again_later_and_later():
    speculation = chooser()
    (sequence,) = decoding(speculation, 1, 0.0)
    sequence.guessing.next_try = 0
    tries = []
    for number in range(900):
        if chosen(speculation, [sequence]) == [1]:
            tries.append(number)
            speculation.planned(sequence)
            speculation.learn(sequence, 1, 0)
        sequence.tokens.append(0)
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_PAUSE
    assert len(tries) < 8


def test_a_new_sequence_tries_late_where_few_guesses_of_others_were_right():
    speculation = chooser()
    (other,) = decoding(speculation, 1, 0.5)
    for _ in range(100):
        speculation.learn(other, 1, 0)
    sequence = running(1, 1000)
    speculation.begin(sequence)
    tries = []
    for number in range(1000):
        if chosen(speculation, [sequence]) == [1]:
            tries.append(number)
            speculation.planned(sequence)
            speculation.learn(sequence, 1, 0)
        sequence.tokens.append(0)
    assert tries == [LATE, 2 * LATE, 2 * LATE + MAX_PAUSE, 2 * LATE + 2 * MAX_PAUSE, 2 * LATE + 3 * MAX_PAUSE]


def test_one_right_guess_is_enough_to_go_on():
    speculation = chooser()
    (sequence,) = decoding(speculation, 1, 0.0)
    speculation.learn(sequence, 1, 1)
    assert chosen(speculation, [sequence]) >= [2]


def test_a_sequence_begins_as_the_others_went():
    speculation = chooser()
    (first,) = decoding(speculation, 1, 0.5)
    for _ in range(100):
        speculation.learn(first, 4, 4)
    (second,) = [running(9, 1000)]
    speculation.begin(second)
    assert second.guessing.chance > 0.95


def test_nothing_is_guessed_beyond_the_end_of_an_answer():
    speculation = chooser()
    (sequence,) = decoding(speculation, 1, 0.99)
    sequence.num_planned = sequence.limit - 4
    assert chosen(speculation, [sequence]) == [2]
    sequence.num_planned = sequence.limit - 2
    assert chosen(speculation, [sequence]) == [0]


def test_where_steps_with_guesses_take_long_only_many_right_ones_pay():
    speculation = chooser(fixed=150.0)
    counts = [chosen(speculation, decoding(speculation, 1, chance))[0] for chance in (0.5, 0.95)]
    assert min(counts) > 0
    speculation._budget.guessing_cost = 4.0
    counts = [chosen(speculation, decoding(speculation, 1, chance))[0] for chance in (0.5, 0.95)]
    assert counts == [0, 7]


def test_tries_that_take_long_are_later_and_of_many_guesses():
    speculation = chooser(fixed=150.0)
    speculation._budget.guessing_cost = 4.0
    sequence = running(1, 10_000)
    speculation.begin(sequence)
    tries = []
    for number in range(2000):
        if count := chosen(speculation, [sequence])[0]:
            tries.append(number)
            assert count == 7
            speculation.planned(sequence)
            speculation.learn(sequence, count, 0)
        sequence.tokens.append(0)
    assert tries[:3] == [0, 3 * MIN_PAUSE, 3 * (MIN_PAUSE + LONGER * MIN_PAUSE)]
    assert tries[-1] - tries[-2] == 3 * MAX_PAUSE


def test_one_try_whose_guesses_are_right_is_enough_to_go_on_where_it_takes_long():
    speculation = chooser(fixed=150.0)
    speculation._budget.guessing_cost = 4.0
    (sequence,) = decoding(speculation, 1, 0.0)
    assert chosen(speculation, [sequence]) == [0]
    sequence.guessing.next_try = 0
    assert chosen(speculation, [sequence]) == [7]
    speculation.learn(sequence, 7, 7)
    sequence.guessing.next_try = 10**9
    assert chosen(speculation, [sequence]) == [7]


def speed(cost: float, chance: float) -> float:
    """Tokens in the time of one without guesses, of answers whose guesses are right by chance."""
    speculation, random_ = chooser(fixed=256.0), random.Random(0)
    speculation._budget.guessing_cost = cost
    steps, num_tokens = 0.0, 0
    for _ in range(30):
        sequence = running(1, 10_000)
        speculation.begin(sequence)
        while len(sequence.tokens) < 600:
            count, num_right = chosen(speculation, [sequence])[0], 0
            if count:
                speculation.planned(sequence)
                while num_right < count and random_.random() < chance:
                    num_right += 1
                speculation.learn(sequence, count, num_right)
            steps += cost * (257 + count) / 257 if count else 1
            sequence.tokens += [0] * (1 + num_right)
            num_tokens += 1 + num_right
    return num_tokens / steps


@pytest.mark.parametrize(
    ("cost", "chance", "least"),
    [(1.0, 0.9, 5.3), (2.0, 0.9, 2.6), (4.0, 0.97, 1.6), (2.0, 0.0, 0.98), (4.0, 0.0, 0.98), (4.0, 0.5, 0.97)],
)
def test_guesses_that_pay_are_made_and_others_cost_little(cost: float, chance: float, least: float):
    """With all seven guesses in every step: 5.5, 2.8 and 1.75."""
    assert speed(cost, chance) > least
