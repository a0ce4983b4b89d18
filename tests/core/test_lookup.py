"""Guesses that are looked up: the tokens that come tell whether they would have been right."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core import lookup
from quire.core.limits import Limits
from quire.core.lookup import CHANCES, LAST_SHARE, MATCH, Lookup, PromptPlaces
from quire.core.plan import Kind
from quire.core.sequence import Sequence
from quire.core.speculation import MAX_READ, MAX_READ_OF_ALL, MIN_READ, Speculation
from quire.core.stats import Counters
from quire.core.step_budget import StepBudget
from tests.core.harness import Harness, limits, request
from tests.core.operations import operations
from tests.fake_executor import expected_tokens

few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=60)


class Found(NamedTuple):
    """The state of a lookup, made by searching all tokens for each of them."""

    place: int
    run: int
    again: float
    chances: list[float]


def place_after(tokens: list[int], end: int) -> int:
    """The place of the guess for the token at `end`: that after the latest earlier place of the three before it."""
    last = tokens[end - MATCH : end]
    if end < MATCH:
        return -1
    return next((at for at in range(end - 1, MATCH - 1, -1) if tokens[at - MATCH : at] == last), -1)


def searched(tokens: list[int], num_prompt: int) -> Found:
    chances, again, run = list(CHANCES), 0.0, 0
    for at in range(max(num_prompt, MATCH), len(tokens)):
        place = place_after(tokens, at)
        is_right = place >= 0 and tokens[place] == tokens[at]
        if run == 0:
            again += LAST_SHARE * (is_right - again)
        if place >= 0:
            chances[run] += LAST_SHARE * (is_right - chances[run])
        run = min(run + 1, len(CHANCES) - 1) if is_right else 0
    return Found(place_after(tokens, len(tokens)), run, again, chances)


@given(few_tokens, st.data())
def test_what_is_found_is_what_a_search_of_all_tokens_finds(tokens: list[int], data: st.DataObject):
    num_prompt = data.draw(st.integers(1, len(tokens)))
    read = Lookup()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "PART_SIZE", data.draw(st.sampled_from([1, 5, 8192])))
        known = data.draw(st.integers(num_prompt, len(tokens)))
        while True:
            read.read(tokens[:known], num_prompt, data.draw(st.integers(1, 20)))
            if read.num_read == known:
                assert Found(read.place, read.run, read.again, read.chances) == searched(tokens[:known], num_prompt)
                if known == len(tokens):
                    break
                known = data.draw(st.integers(known + 1, len(tokens)))


def test_a_guess_is_as_likely_as_all_before_it_together():
    found = Lookup()
    found.chances = [0.5, 0.8, 0.9]
    assert found.chances_of(0, 3) == [0, 0, 0]  # nothing is found
    found.place = 5
    assert found.chances_of(0, 3) == pytest.approx([0.5, 0.5 * 0.8, 0.5 * 0.8 * 0.9])
    assert found.chances_of(2, 2) == pytest.approx([0.5 * 0.8 * 0.9, 0.5 * 0.8 * 0.9 * 0.9])
    found.run = 2
    assert found.chances_of(1, 1) == pytest.approx([0.9 * 0.9])


def test_a_guess_behind_tokens_that_go_on_otherwise_may_be_right_too():
    found = Lookup()
    found.chances, found.again = [0.5, 0.8, 0.9], 0.3
    assert found.chances_of(0, 3) == pytest.approx([0.3, 0.3 * 0.8, 0.3 * 0.8 * 0.9])
    found.place, found.run = 5, 1
    assert found.chances_of(1, 2) == pytest.approx([0.8 * 0.9 + 0.2 * 0.3, 0.8 * 0.9 * 0.9 + 0.2 * 0.3 * 0.8])


# The choice


def chooser(fixed: float = 12.0, slots: int = 32) -> Speculation:
    chosen = Limits(16, 1000, slots, 600, 512, 200_000, max_guesses=7, looks_up=True)
    budget = StepBudget(chosen)
    budget.fixed_tokens = fixed
    return Speculation(chosen, budget, Counters())


def sequence_of(speculation: Speculation, prompt: list[int], max_tokens: int = 2000, number: int = 1) -> Sequence:
    sequence = Sequence(number, request(number, prompt=tuple(prompt), max_tokens=max_tokens), 0, "")
    sequence.own_tokens()
    speculation.begin(sequence)
    sequence.num_planned = len(prompt) - 1
    return sequence


def made_for(speculation: Speculation, sequence: Sequence, answer: list[int], in_flight: int = 1) -> list[int]:
    """The guesses of each step when the answer comes token by token, the last `in_flight` of them unknown."""
    made = []
    for token in answer:
        sequence.num_planned = len(sequence.tokens) - 1 + in_flight
        made.append(speculation.choose([sequence], 1).get(sequence.id, 0))
        sequence.tokens.append(token)
    return made


@pytest.mark.parametrize("fixed", [5.0, 12.0, 256.0])
@pytest.mark.parametrize("in_flight", [0, 1, 4])
def test_text_that_repeats_nothing_makes_no_guess(fixed: float, in_flight: int):
    tokens = random.Random(0).sample(range(50_000), 1500)
    speculation = chooser(fixed)
    assert not any(made_for(speculation, sequence_of(speculation, tokens[:500]), tokens[500:], in_flight))


@pytest.mark.parametrize("in_flight", [0, 1, 4])
def test_a_copy_that_begins_late_is_guessed_after_a_few_tokens(in_flight: int):
    tokens = random.Random(0).sample(range(50_000), 1500)
    speculation = chooser()
    sequence = sequence_of(speculation, tokens[:500])
    copied = tokens[100:160]
    made = made_for(speculation, sequence, tokens[500:] + copied, in_flight)
    begun = len(tokens) - 500
    assert not any(made[: begun + MATCH])
    assert all(made[begun + MATCH + 3 :])
    assert made[-1] == 7


def test_a_copy_that_ends_makes_no_more_guesses():
    tokens = random.Random(0).sample(range(50_000), 600)
    speculation = chooser()
    made = made_for(speculation, sequence_of(speculation, tokens[:500]), tokens[100:160] + tokens[500:], in_flight=0)
    assert all(made[10:60])
    assert not any(made[61:])  # the first of them is guessed as the copy would go on


def test_text_whose_repetitions_go_on_otherwise_is_soon_not_guessed():
    others = random.Random(0).sample(range(10, 50_000), 400)
    answer = [token for other in others for token in (1, 2, 3, other)]
    speculation = chooser()
    made = made_for(speculation, sequence_of(speculation, [7, 8, 9]), answer)
    assert sum(made[:100]) > 0
    assert sum(made[100:]) == 0


def test_many_rows_read_little_each_and_a_long_prompt_is_read_in_pieces():
    speculation = chooser(fixed=256.0)
    tokens = random.Random(0).sample(range(300_000), 100_000)
    sequences = [
        sequence_of(speculation, tokens[:100_000], number=1),
        sequence_of(speculation, [5, 6, 7] * 8, number=2),
    ]
    before, steps = 0, 0
    while before < len(tokens) + 24:
        chosen = speculation.choose(sequences, 2)
        num_read = sum(sequence.guessing.lookup.num_read for sequence in sequences)
        assert before < num_read <= before + MAX_READ
        assert 2 in chosen  # the short one does not wait for the long one
        before, steps = num_read, steps + 1
    assert steps >= len(tokens) / MAX_READ


def test_however_many_rows_there_are_a_step_reads_a_bounded_number_of_tokens_and_the_newest_of_each():
    speculation = chooser(fixed=256.0)
    tokens = random.Random(0).sample(range(300_000), 2000)
    many = [sequence_of(speculation, tokens, number=number) for number in range(300)]
    before = [0] * 300
    while min(before) < len(tokens):
        speculation.choose(many, 300)
        now = [sequence.guessing.lookup.num_read for sequence in many]
        read = [after - earlier for earlier, after in zip(before, now, strict=True)]
        assert all(number or earlier == len(tokens) for number, earlier in zip(read, before, strict=True))
        assert max(read) <= MIN_READ
        assert sum(read) <= MAX_READ_OF_ALL + 300
        before = now


def test_the_cost_of_a_choice_grows_with_the_rows_and_no_faster():
    costs = []
    for num_rows in (50, 500):
        speculation = chooser(fixed=500.0, slots=num_rows)
        speculation._budget.padded_sizes = (64, 128, 256, 512, 1024)
        sequences = [sequence_of(speculation, [5, 6, 7, 8] * 4, number=number) for number in range(num_rows)]
        speculation.choose(sequences, num_rows)
        for sequence in sequences:
            sequence.tokens.append(5)
            sequence.num_planned += 1
        costs.append(operations(lambda chosen=(speculation, sequences): chosen[0].choose(chosen[1], len(chosen[1]))))
    assert costs[1] <= 11 * costs[0]


def test_as_many_guesses_are_made_as_give_the_most_tokens_where_sizes_are_padded():
    """As if each number of them were tried."""
    chance = random.Random(0)
    for _ in range(300):
        speculation = chooser(fixed=chance.choice([5.0, 64.0, 500.0]))
        budget, rows = speculation._budget, chance.randint(1, 32)
        budget.padded_sizes = tuple(sorted(chance.sample(range(1, 60), chance.randint(0, 6))))
        budget.size_costs = {(True, size): 1 + chance.random() for size in budget.padded_sizes[::2]}
        chances = sorted((chance.random() for _ in range(chance.randint(0, 40))), reverse=True)
        rates = [
            (rows + sum(chances[:count])) / budget.cost(rows + count, count > 0) for count in range(len(chances) + 1)
        ]
        best = speculation._best_count(chances, rows)
        assert rates[best] == pytest.approx(max(rates))


@given(few_tokens, st.data())
def test_samples_that_share_a_prompt_find_what_each_alone_finds(tokens: list[int], data: st.DataObject):
    """Whichever of them reads it, and as far as the others have come."""
    num_prompt = len(tokens)
    prompt = PromptPlaces()
    answers = [data.draw(st.lists(st.integers(0, 3), max_size=12)) for _ in range(3)]
    samples = [(Lookup(prompt), Lookup(), tokens + answer) for answer in answers]
    left = list(samples)
    while left:
        shared, alone, known = sample = data.draw(st.sampled_from(left))
        before = max(prompt.num_read, shared.num_read)
        most = data.draw(st.integers(1, 9))
        shared.read(known, num_prompt, most)
        assert shared.num_read <= before + most
        if shared.num_read == len(known):
            alone.read(known, num_prompt, len(known))
            assert alone.num_read == len(known)
            assert (shared.place, shared.run, shared.again) == (alone.place, alone.run, alone.again)
            assert shared.chances == alone.chances
            left.remove(sample)


def test_samples_of_a_request_read_its_prompt_once():
    speculation = chooser(fixed=256.0)
    prompt = random.Random(0).sample(range(5000), 3000)
    samples = [sequence_of(speculation, prompt) for _ in range(3)]
    other = sequence_of(speculation, prompt, number=2)
    num_steps = 0
    while samples[0].guessing.lookup.num_read < len(prompt):
        speculation.choose(samples[:1], 1)
        num_steps += 1
    assert num_steps == 2
    speculation.choose(samples, 3)
    assert [sample.guessing.lookup.num_read for sample in samples] == [3000] * 3
    speculation.choose([other], 1)
    assert other.guessing.lookup.num_read == MAX_READ, "another request may have another prompt"


def test_nothing_is_guessed_before_all_tokens_are_read():
    """A sequence that goes on after another engine, beside many."""
    speculation = chooser(fixed=2000.0)
    sequence = sequence_of(speculation, [5, 6, 7, 8])
    sequence.tokens += [5, 6, 7, 8] * 20
    sequence.num_planned = len(sequence.tokens) - 1
    num_steps = -(-len(sequence.tokens) // MIN_READ)
    made = [speculation.choose([sequence], 300).get(1, 0) for _ in range(num_steps)]
    assert [count > 0 for count in made] == [False] * (num_steps - 1) + [True]


def test_nothing_is_looked_up_beyond_the_end_of_an_answer():
    speculation = chooser(fixed=500.0)
    for left, most in ((1, 0), (2, 0), (3, 1), (4, 2), (20, 7)):
        sequence = sequence_of(speculation, [5, 6, 7, 8] * 8, max_tokens=left)
        sequence.num_planned = len(sequence.tokens)
        sequence.guessing.lookup.chances = [0.95] * 8
        assert speculation.choose([sequence], 1).get(1, 0) == most


def test_nothing_is_read_where_no_guess_could_pay():
    speculation = chooser(fixed=1.0)
    sequences = [sequence_of(speculation, [5, 6, 7] * 8, number=number) for number in range(32)]
    assert speculation.choose(sequences, 32) == {}
    assert not any(sequence.guessing.lookup.num_read for sequence in sequences)


def test_fewer_guesses_are_made_behind_more_tokens_that_are_not_known():
    speculation = chooser(fixed=5.0)
    sequence = sequence_of(speculation, [5, 6, 7, 8] * 8)
    counts = []
    for in_flight in (0, 1, 2, 8, 16):
        sequence.num_planned = len(sequence.tokens) - 1 + in_flight
        counts.append(speculation.choose([sequence], 1).get(1, 0))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


def test_guesses_are_as_many_as_the_measured_times_of_steps_make_worth_while():
    speculation = chooser(fixed=5.0)
    sequence = sequence_of(speculation, [5, 6, 7, 8] * 8)
    sequence.guessing.lookup.chances = [0.95] * 8
    assert speculation.choose([sequence], 1) == {1: 7}
    speculation._budget.size_costs = {(True, size): 1.4 for size in (5, 6, 7, 8)}  # four at a time
    assert speculation.choose([sequence], 1) == {1: 3}
    speculation._budget.size_costs = {(True, size): 4.0 for size in range(2, 9)}
    assert speculation.choose([sequence], 1) == {}


def test_guesses_that_seem_to_cost_too_much_are_made_now_and_then_where_they_would_be_right():
    """Or their cost would never be measured again."""
    speculation = chooser(fixed=256.0)
    speculation._budget.guessing_cost = 16.0
    sequence = sequence_of(speculation, [5, 6, 7, 8] * 8, max_tokens=20_000)
    sequence.guessing.lookup.chances = [0.95] * 8
    tries = []
    for number in range(1000):
        if count := speculation.choose([sequence], 1).get(1, 0):
            tries.append(number)
            speculation.planned(sequence)
            speculation.learn(sequence, count, count)
        sequence.tokens.append([5, 6, 7, 8][number % 4])
        sequence.num_planned += 1
    assert 2 <= len(tries) < 8
    unlike = sequence_of(speculation, random.Random(0).sample(range(50_000), 100))
    assert not any(made_for(speculation, unlike, random.Random(1).sample(range(50_000), 500)))


# With a scheduler


def test_a_sequence_that_was_preempted_goes_on_with_what_was_read():
    harness = Harness(limits(page_size=8, max_guesses=4, looks_up=True, max_step_tokens=40), guess_percent=100)
    asked = request(1, prompt=(5, 6, 7) * 5, max_tokens=40)
    harness.add(asked)
    for _ in range(6):
        harness.step()
    (sequence,) = harness.scheduler._requests.sequences(1)
    read = sequence.guessing.lookup
    num_read = read.num_read
    assert num_read >= 15
    harness.scheduler.restart()
    harness.executor.reset()
    harness.in_flight.clear()
    harness.step()
    assert read.num_read >= num_read
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(asked)
    assert sequence.guessing.lookup is read
    known = sequence.tokens[: read.num_read]
    assert (read.place, read.run, read.again, read.chances) == searched(known, 15)


def test_a_prompt_that_repeats_itself_is_guessed_from_the_first_step():
    """Before the first token of the answer is known."""
    allowed = limits(page_size=8, max_guesses=4, looks_up=True, max_step_tokens=40)
    harness = Harness(allowed, lookahead=1, guess_percent=100)
    harness.add(request(1, prompt=(5, 6, 7) * 5, max_tokens=20))
    harness.plan()
    plan = harness.plan()
    assert [chunk.kind for chunk in plan.chunks] == [Kind.VERIFY]
    harness.run()
    assert harness.scheduler.counters.guesses > 0
