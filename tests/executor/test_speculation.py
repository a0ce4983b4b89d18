"""Guesses change no token: not greedy ones, not sampled ones, however requests are scheduled."""

from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from quire.core.lookup import Lookup
from quire.core.plan import Kind, StepPlan
from quire.executor.draft.guesses import guess_by_lookup
from quire.executor.programs.catalog import Catalog
from quire.executor.programs.kinds import Key
from quire.executor.programs.ladder import StepShape
from quire.executor.shapes import Shapes
from quire.executor.slots import empty_slots
from quire.request import FinishReason, Request, SamplingParams
from tests.executor.faulty_executor import FaultyExecutor
from tests.executor.rig import Rig, Run
from tests.executor.workload import GREEDY

SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no look-ahead": {"lookahead": 0},
    "two steps ahead": {"lookahead": 2},
    "no prefix cache": {"prefix_caching": False},
    "one at a time": {"max_batch_size": 1},
    "small chunks, two steps ahead": {"max_batch_prefill_tokens": 7, "lookahead": 2},
    "few pages": {},
    "few pages, two steps ahead": {"lookahead": 2},
    "bursts": {"max_burst": 4},
    "by the tokens of each sequence": {"looks_up": True},
    "by the tokens of each sequence, few pages, two steps ahead": {"looks_up": True, "lookahead": 2},
}


def test_the_host_looks_up_what_the_device_guesses() -> None:
    """Where the last three tokens stood before; there alone the host says what a guess would be."""
    chance, longest, rows = np.random.default_rng(0), 40, 200
    history = chance.integers(0, 4, (rows, longest + 8), np.int32)
    lengths = chance.integers(3, longest, rows, np.int32)
    empty = empty_slots(Shapes(2, 16, 1, 16, 16, guesses=1))
    slots = empty._replace(history=jnp.asarray(history), lengths=jnp.asarray(lengths))
    guessed = guess_by_lookup(slots, jnp.arange(rows), 1).history
    num_found = 0
    for tokens, length, after in zip(history.tolist(), lengths.tolist(), guessed.tolist(), strict=True):
        lookup = Lookup()
        lookup.read(tokens[:length], int(chance.integers(1, length + 1)), longest)
        if lookup.place >= 0:
            num_found += 1
            assert after[length] == tokens[lookup.place]
    assert 30 < num_found < rows


def repeating(rig: Rig, count: int, sampling: SamplingParams, seed: int = 0, **changes: Any) -> list[Request]:
    """Prompts that repeat a few tokens, after which answers are likely to repeat some too."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        period = rng.integers(0, rig.model.vocab_size, int(rng.integers(2, 6))).tolist()
        prompt = tuple((period * 20)[: int(rng.integers(8, 60))])
        fields: dict[str, Any] = {"max_tokens": int(rng.integers(8, 60)), "seed": number, "salt": rig.salt(prompt)}
        requests.append(Request(number, prompt, sampling=sampling, **(fields | changes)))
    return requests


def check_same(rig: Rig, requests: list[Request], **settings: Any) -> Run:
    """The answers with guesses are those without, to the last token."""
    plain = rig.run(requests, **{**settings, "max_guesses": 0})
    guessed = rig.run(requests, **settings)
    assert not plain.failures
    assert not guessed.failures
    assert guessed.tokens() == plain.tokens()
    assert plain.engine.scheduler.counters.guesses == 0
    return guessed


@pytest.mark.parametrize("name", SCHEDULES)
def test_greedy_answers_are_the_same(guessing_llama: Rig, name: str) -> None:
    check_greedy(guessing_llama, name)


@pytest.mark.parametrize("name", ["plain", "few pages, two steps ahead", "bursts"])
def test_greedy_answers_are_the_same_with_other_programs(specialised_guessing_llama: Rig, name: str) -> None:
    check_greedy(specialised_guessing_llama, name)


@pytest.mark.parametrize("name", ["two steps ahead", "few pages"])
def test_greedy_answers_are_the_same_with_windows(guessing_gemma: Rig, name: str) -> None:
    assert guessing_gemma.limits().page_groups != (None,)
    check_greedy(guessing_gemma, name)


def check_greedy(guessing: Rig, name: str) -> None:
    requests = repeating(guessing, 10, GREEDY)
    pages = {"num_pages": 3 + guessing.limits().pages_of(118)} if "few pages" in name else {}
    run = check_same(guessing, requests, **SCHEDULES[name], **pages)
    counters = run.engine.scheduler.counters
    assert counters.right_guesses > 15
    assert counters.guesses > counters.right_guesses
    assert (counters.preemptions > 0) == ("few pages" in name)
    assert sum(guessing.near_ties(one, run.answers[one.request_id, 0].tokens) for one in requests) <= 1


SAMPLING = {
    "cold": SamplingParams(temperature=0.2),
    "two best": SamplingParams(temperature=0.7, top_k=2),
    "top-p": SamplingParams(temperature=0.5, top_p=0.5, min_p=0.05),
    "penalties": SamplingParams(temperature=0.1, repetition_penalty=1.02, frequency_penalty=0.05, presence_penalty=0.1),
    "bias": SamplingParams(temperature=0.1, logit_bias={5: 12.0, 7: 12.5}),
    "log-probabilities": SamplingParams(temperature=0.1, logprobs=3),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_answers_are_the_same(guessing_llama: Rig, name: str) -> None:
    requests = repeating(guessing_llama, 8, SAMPLING[name], seed=1, samples=2)
    run = check_same(guessing_llama, requests, lookahead=2)
    assert run.engine.scheduler.counters.guesses > 20
    assert run.engine.scheduler.counters.right_guesses > 0


@pytest.mark.parametrize("name", ["cold", "two best", "penalties"])
def test_sampled_answers_are_the_same_with_other_programs(specialised_guessing_llama: Rig, name: str) -> None:
    requests = repeating(specialised_guessing_llama, 8, SAMPLING[name], seed=1, samples=2)
    run = check_same(specialised_guessing_llama, requests, lookahead=2)
    assert run.engine.scheduler.counters.guesses > 20


@pytest.mark.parametrize("asks", [False, True])
def test_one_program_guesses_computes_and_samples_where_nothing_but_tokens_is_asked_for(
    specialised_guessing_llama: Rig, asks: bool
) -> None:
    rig = specialised_guessing_llama
    used: set[str] = set()

    def get(key: Key) -> Any:
        used.add("step" if isinstance(key, StepShape) else key[0])
        return whole(key)

    whole = rig.executor.programs.get
    requests = repeating(rig, 6, SAMPLING["two best" if asks else "cold"], seed=5, samples=2)
    with patch.object(rig.executor.programs, "get", get):
        run = rig.run(requests)
    assert run.engine.scheduler.counters.right_guesses > 0
    assert ("verify" in used) == (not asks)
    assert "guess" in used, "beside prompts"


@pytest.mark.parametrize(("slots", "guesses", "largest"), [(1, 4, 8), (4, 12, 16), (8, 32, 48), (256, 64, 64)])
def test_programs_verify_no_more_tokens_than_a_step_samples(slots: int, guesses: int, largest: int) -> None:
    shapes = Shapes(
        100, 32, slots, 2048, 4096, min_tokens=8, is_fine=True, specialised=True, guesses=4, step_guesses=guesses
    )
    made = [key[1] for key in Catalog(shapes).keys if key[0] == "verify"]
    assert (min(made), max(made)) == (8, largest)
    with_draft = [key[0] for key in Catalog(shapes, looks_up=False).keys]
    assert "draft" in with_draft
    assert "verify" not in with_draft


def test_log_probabilities_are_the_same(guessing_llama: Rig) -> None:
    requests = repeating(guessing_llama, 6, SamplingParams(temperature=0, logprobs=2), seed=2, prompt_logprobs=1)
    plain = guessing_llama.run(requests, max_guesses=0)
    guessed = guessing_llama.run(requests)
    assert guessed.engine.scheduler.counters.right_guesses > 0
    for key, answer in plain.answers.items():
        for one, other in (
            (answer.logprobs, guessed.answers[key].logprobs),
            (answer.prompt_logprobs, guessed.answers[key].prompt_logprobs),
        ):
            assert [entry.top_ids for entry in one] == [entry.top_ids for entry in other]
            np.testing.assert_allclose([entry.logprob for entry in one], [entry.logprob for entry in other], atol=1e-4)


@pytest.mark.parametrize("min_tokens", [0, 30])
def test_ends_and_shortest_answers_are_kept(guessing_llama: Rig, min_tokens: int) -> None:
    """An end in the middle of right guesses, and one that must not come yet."""
    few = SamplingParams(temperature=0.5, logit_bias={5: 12.0, 7: 12.0, 9: 10.5})
    requests = repeating(guessing_llama, 8, few, seed=3, end_ids=(9,), min_tokens=min_tokens, max_tokens=60)
    run = check_same(guessing_llama, requests)
    assert run.engine.scheduler.counters.right_guesses > 30
    assert FinishReason.END in {answer.finish for answer in run.answers.values()}
    assert all(len(answer.tokens) >= min_tokens for answer in run.answers.values())


def test_answers_are_the_same_after_a_step_has_failed(guessing_llama: Rig) -> None:
    """The search for a culprit, and the steps after it, begin again from the tokens on the host."""
    failed: list[int] = []

    def fails(plan: StepPlan) -> bool:
        if len(failed) < 3 and any(chunk.kind is Kind.VERIFY for chunk in plan.chunks) and plan.step % 7 == 0:
            failed.append(plan.step)
            return True
        return False

    requests = repeating(guessing_llama, 6, SAMPLING["cold"], seed=4)
    plain = guessing_llama.run(requests, max_guesses=0)
    faulty = FaultyExecutor(guessing_llama.executor, fails)
    run = guessing_llama.run(requests, engine=guessing_llama.engine(executor=faulty))
    assert len(failed) == 3
    assert not run.failures
    assert run.tokens() == plain.tokens()


def test_an_answer_may_be_guessed_to_its_last_position(guessing_llama: Rig) -> None:
    longest = guessing_llama.shapes.max_sequence_tokens
    prompts = [(5, 6) * 60, (5, 6, 7) * 20]
    requests = [Request(number, p, longest - len(p), GREEDY) for number, p in enumerate(prompts)]
    run = check_same(guessing_llama, requests, lookahead=2)
    assert [len(run.answers[number, 0].tokens) for number in range(2)] == [longest - len(p) for p in prompts]


def test_a_request_that_goes_on_after_another_engine_is_guessed_for(guessing_llama: Rig) -> None:
    (request,) = repeating(guessing_llama, 1, SAMPLING["two best"], seed=5, max_tokens=50)
    whole = guessing_llama.run([request], max_guesses=0).answers[0, 0].tokens
    engine = guessing_llama.engine()
    engine.add(request, so_far=[whole[:20]])
    run = guessing_llama.run([], engine=engine)
    assert run.answers[0, 0].tokens == whole[20:]
    assert engine.scheduler.counters.guesses > 0
