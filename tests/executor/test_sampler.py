"""Sampling on the device against plain numpy."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from quire.errors import InvalidRequest
from quire.executor.sample.sampler import NOT_NUMBERS, NOTHING_LEFT, Features
from quire.executor.step import SamplingWay, sample_next
from quire.ops.gpu.filter_cuts import filter_cuts
from quire.ops.gpu.token_draws import draw_tokens
from quire.ops.sampling_kernels import SamplingKernels
from quire.request import MAX_ADJUSTED_TOKENS, MAX_LOGPROBS, Request, SamplingParams
from tests.executor.sampling import draws, sampling, slot_start, slots_of
from tests.executor.sampling_reference import distribution, log_softmax, penalised

Array = np.ndarray[Any, Any]
VOCAB = 300  # no multiple of the sampler's blocks
ROWS = 8
NUM_DRAWS = 10_000
GREEDY = SamplingParams(temperature=0)
CUTS, DRAWS = partial(filter_cuts, interpret=True), partial(draw_tokens, interpret=True)


class GivenLogits:
    """A model whose hidden vectors are its logits."""

    def logits(self, head: Any, hidden: jax.Array) -> jax.Array:
        return hidden


def some_logits(*shape: int, seed: int = 0, spread: float = 2.0) -> Array:
    return np.random.default_rng(seed).normal(0, spread, shape).astype(np.float32)


def chi_square_is_plausible(tokens: Array, probabilities: Array) -> bool:
    """Whether counts fit a distribution: below the value that one fair sample in 100,000 exceeds."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert len(counts) == len(probabilities), "a token beyond the vocabulary was drawn"
    assert not counts[probabilities == 0].any(), "a token was drawn that has no chance"
    expected = probabilities * len(tokens)
    order = np.argsort(expected)
    # What is expected less than ten times is counted together.
    cells = np.maximum.accumulate(np.cumsum(expected[order]) // 10)
    counts, expected = (np.bincount(np.unique(cells, return_inverse=True)[1], x[order]) for x in (counts, expected))
    keep = expected >= 5
    counts = np.append(counts[keep], counts[~keep].sum())
    expected = np.append(expected[keep], expected[~keep].sum())
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum() if len(counts) > 1 else 0.0
    freedom = max(len(counts) - 1, 1)
    # Wilson and Hilferty's approximation of the quantile; 4.26 standard deviations leave 1e-5.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.26 * np.sqrt(2 / (9 * freedom))) ** 3
    return bool(statistic < limit)


CASES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=7),
    "top_k of one": SamplingParams(top_k=1),
    "top_k beyond the vocabulary": SamplingParams(top_k=10_000),
    "top_p": SamplingParams(top_p=0.6),
    "top_p of next to nothing": SamplingParams(top_p=1e-6),
    "top_p of nearly all": SamplingParams(top_p=0.999),
    "min_p": SamplingParams(min_p=0.05),
    "min_p of one": SamplingParams(min_p=1.0),
    "typical_p": SamplingParams(typical_p=0.4),
    "top_k and top_p": SamplingParams(top_k=20, top_p=0.7),
    "top_k and typical_p": SamplingParams(top_k=20, typical_p=0.5, temperature=1.5),
    "all of them": SamplingParams(temperature=1.3, top_k=60, top_p=0.9, min_p=0.02, typical_p=0.8),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name: str) -> None:
    logits = some_logits(VOCAB)
    tokens = draws(logits, CASES[name], NUM_DRAWS)
    assert chi_square_is_plausible(tokens, distribution(logits, CASES[name]))


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "min_p", "typical_p", "all of them"])
def test_tokens_of_equal_logits_have_equal_chances(name: str) -> None:
    logits = np.round(some_logits(VOCAB, spread=1.5))
    assert len(np.unique(logits)) < 15
    tokens = draws(logits, CASES[name], NUM_DRAWS)
    assert chi_square_is_plausible(tokens, distribution(logits, CASES[name]))


def test_the_test_of_distributions_notices_a_tenth_of_a_degree() -> None:
    logits = some_logits(VOCAB)
    tokens = draws(logits, SamplingParams(temperature=1.1), NUM_DRAWS)
    assert not chi_square_is_plausible(tokens, distribution(logits, SamplingParams()))


def test_the_test_of_distributions_notices_an_order_of_filters_other_than_the_documented_one() -> None:
    """A nucleus of the whole vocabulary cut to k tokens is more than a nucleus of the k."""
    logits = some_logits(VOCAB)
    tokens = draws(logits, SamplingParams(top_k=20, top_p=0.7), NUM_DRAWS)
    whole = distribution(logits, SamplingParams(top_p=0.7))
    other = np.where(whole >= np.sort(whole)[-20], whole, 0)
    assert not np.array_equal(other > 0, distribution(logits, SamplingParams(top_k=20, top_p=0.7)) > 0)
    assert not chi_square_is_plausible(tokens[np.isin(tokens, np.flatnonzero(other))], other / other.sum())


def test_a_very_unlikely_token_is_drawn_as_often_as_it_should_be() -> None:
    """Spread over all blocks and places within one, among tokens that are far likelier."""
    logits = np.full(VOCAB, -20.0, np.float32)
    logits[3], logits[100], logits[260], logits[299] = 0.0, np.log(2e-3), np.log(1e-3), np.log(2e-3)
    tokens = np.concatenate([draws(logits, SamplingParams(), NUM_DRAWS, seed=seed) for seed in range(5)])
    assert chi_square_is_plausible(tokens, distribution(logits, SamplingParams()))


def test_seeds_and_samples_and_tokens_draw_independently() -> None:
    starts = [
        slot_start(SamplingParams(), slot=number, seed=number // 2 * 2**40, sample=number % 2) for number in range(ROWS)
    ]
    slots = slots_of(starts)
    flat = np.zeros((ROWS, VOCAB), np.float32)
    drawn = np.stack([sampling(flat, slots, np.arange(ROWS), np.full(ROWS, p)).tokens for p in range(200)])
    pairs = [(a, b) for a in range(ROWS) for b in range(a)]
    # Rows agree by chance alone: 200 / 300 times on average.
    assert max((drawn[:, a] == drawn[:, b]).sum() for a, b in pairs) < 8
    again = np.stack([sampling(flat, slots, np.arange(ROWS)[::-1], np.full(ROWS, p)).tokens for p in range(200)])
    assert np.array_equal(again[:, ::-1], drawn)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-39, 1e-37, 1e-6])
def test_no_temperature_at_all_and_next_to_none_take_the_likeliest_token(temperature: float) -> None:
    logits = some_logits(ROWS, VOCAB, spread=30)
    slots = slots_of([slot_start(SamplingParams(temperature=temperature))])
    out = sampling(logits, slots, np.zeros(ROWS, int), np.arange(ROWS))
    assert out.tokens.tolist() == logits.argmax(axis=-1).tolist()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, [7, 70]] = 1
    assert sampling(logits, slots_of([slot_start(GREEDY)]), [0] * ROWS, [0] * ROWS).tokens.tolist() == [7] * ROWS


PENALTIES = [
    SamplingParams(temperature=0, repetition_penalty=1.7),
    SamplingParams(temperature=0, repetition_penalty=0.5),
    SamplingParams(temperature=0, frequency_penalty=1.5),
    SamplingParams(temperature=0, presence_penalty=-2.0),
    SamplingParams(temperature=0, logit_bias={5: 40.0, 299: -100.0, 0: 3.0}),
    SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=-0.7, presence_penalty=0.4, logit_bias={9: 2}
    ),
]


@pytest.mark.parametrize("params", PENALTIES)
def test_penalties_and_biases_change_logits_as_in_numpy(params: SamplingParams) -> None:
    """Seen through greedy draws: each of many rows has two tokens raised to within a hair of each other."""
    rng = np.random.default_rng(3)
    prompt, answer = rng.integers(0, 12, 9).tolist(), rng.integers(4, 16, 20).tolist()
    other = slot_start(SamplingParams(temperature=0, presence_penalty=2.0), prompt=(3,), generated=(4, 5, 6))
    slots = slots_of([other, slot_start(params, slot=1, prompt=tuple(prompt), generated=tuple(answer))])
    differs = 0
    for trial in range(20):
        logits = some_logits(ROWS, VOCAB, seed=trial, spread=1)
        logits[:, :16] += 3
        position = len(prompt) + len(answer) - 1
        out = sampling(logits, slots, np.ones(ROWS, int), np.full(ROWS, position))
        expected = [penalised(row, prompt, answer, params).argmax() for row in logits]
        assert out.tokens.tolist() == expected
        differs += int((logits.argmax(axis=-1) != expected).sum())
    assert differs > 10


def test_penalties_count_what_was_sampled_up_to_now_and_nothing_after_it() -> None:
    """The history of a slot goes on beyond a position when the position is computed again."""
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    slots = slots_of([slot_start(params, prompt=(1, 2), generated=(10, 11, 12))])
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 10:13] = [1.0, 0.5, 0.2]
    # After the prompt alone nothing is penalised, then one token more at each position.
    out = sampling(logits, slots, [0] * ROWS, [1, 2, 3, 4, 1, 2, 3, 4])
    assert out.tokens.tolist() == [10, 11, 12, 0] * 2


def test_ends_are_forbidden_until_min_tokens() -> None:
    slots = slots_of([slot_start(GREEDY, prompt=(1, 2, 3), min_tokens=4, end_ids=(8, 9))])
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 8], logits[:, 9], logits[:, 5] = 3, 2, 1
    # The token after position 2 is the first of the answer.
    out = sampling(logits, slots, [0] * ROWS, np.arange(ROWS) + 2)
    assert out.tokens.tolist() == [5] * 4 + [8] * 4


def test_a_bias_does_not_lift_what_is_forbidden() -> None:
    params = SamplingParams(temperature=0, logit_bias={8: 100.0})
    slots = slots_of([slot_start(params, min_tokens=1, end_ids=(8,))])
    assert 8 not in sampling(some_logits(ROWS, VOCAB), slots, [0] * ROWS, [0] * ROWS).tokens


def mask_of(allowed: list[int]) -> Array:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view("<u4")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_a_mask_allows_is_sampled(temperature: float) -> None:
    rng = np.random.default_rng(0)
    allowed = [sorted(rng.choice(VOCAB, size, replace=False).tolist()) for size in (1, 2, 3, 50, 1, 2, 3, 299)]
    masks = np.stack([mask_of(row) for row in allowed])
    logits = some_logits(ROWS, VOCAB)
    slots = slots_of([slot_start(SamplingParams(temperature=temperature))])
    drawn = [sampling(logits, slots, [0] * ROWS, [p] * ROWS, masks).tokens for p in range(30)]
    for row, these in enumerate(allowed):
        assert {int(tokens[row]) for tokens in drawn} <= set(these)
        if temperature == 0:
            assert drawn[0][row] == max(these, key=lambda token: logits[row, token])


def test_features_that_are_off_change_nothing() -> None:
    """A row that asks for something gets it only in a step that says so; the executor must say so."""
    params = SamplingParams(temperature=0, presence_penalty=2.0, logit_bias={1: 100.0}, logprobs=1)
    slots = slots_of([slot_start(params, generated=(3,) * 5)])
    logits = some_logits(ROWS, VOCAB)
    out = sampling(logits, slots, [0] * ROWS, [5] * ROWS, np.zeros((ROWS, 10), np.uint32), off=Features._fields)
    assert out.tokens.tolist() == logits.argmax(axis=-1).tolist()
    assert not out.logprobs.any()
    assert not out.top_logprobs.any()


@pytest.mark.parametrize(
    "kernels", [SamplingKernels(), SamplingKernels(CUTS), SamplingKernels(CUTS, draw_tokens=DRAWS)]
)
@pytest.mark.parametrize("name", ["plain", "filtered", "any"])
def test_programs_without_branches_and_with_a_kernel_draw_the_same_tokens(
    name: SamplingWay, kernels: SamplingKernels
) -> None:
    kinds = [GREEDY, SamplingParams(), *(CASES.values() if name != "plain" else [SamplingParams(temperature=0.3)])]
    starts = [slot_start(params, slot, seed=slot) for slot, params in enumerate(kinds[:8])]
    slots = slots_of(starts)
    rows = np.arange(len(starts))
    logits = some_logits(len(starts), VOCAB)
    asked = np.asarray([name != "plain", 0, 0, 0, 0])
    packed = np.concatenate([rows, np.zeros_like(rows), np.ones_like(rows), asked]).astype(np.int32)
    masks = np.zeros((len(starts), 10), np.uint32)
    inputs = {}, slots, logits, packed, masks
    with_branches = sample_next("any", GivenLogits(), len(starts), *inputs)[1]
    without = jax.jit(partial(sample_next, name, GivenLogits(), len(starts), kernels=kernels))(*inputs)[1]
    assert without.tokens.tolist() == with_branches.tokens.tolist()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), CASES["all of them"]])
@pytest.mark.parametrize("vocab", [VOCAB, 4096])
def test_a_row_of_logits_that_are_not_numbers_fails_alone(params: SamplingParams, vocab: int) -> None:
    logits = some_logits(ROWS, vocab)
    logits[1, 5], logits[2, 299], logits[4], logits[5], logits[6, ::2] = np.nan, np.inf, -np.inf, np.nan, -np.inf
    masks = np.full((ROWS, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    masks[[1, 7]], masks[1, 0] = 0, 1 << 6 | 1 << 7  # which hides the NaN
    tokens = sampling(logits, slots_of([slot_start(params)]), [0] * ROWS, [0] * ROWS, masks).tokens
    assert tokens[[1, 2, 4, 5, 7]].tolist() == [NOT_NUMBERS] * 4 + [NOTHING_LEFT]
    assert all(0 <= token < vocab for token in tokens[[0, 3, 6]])
    assert tokens[6] % 2 == 1


AT_LIMITS = [
    {"temperature": 1e-320}, {"temperature": 100.0}, {"top_p": 1e-30}, {"top_p": 0.0}, {"typical_p": 1e-30},
    {"top_p": 1e-320}, {"min_p": 1e-320},
    {"min_p": 1.0}, {"repetition_penalty": 0.01}, {"repetition_penalty": 100.0}, {"frequency_penalty": -2.0},
    {"frequency_penalty": 1e-320}, {"presence_penalty": 2.0}, {"presence_penalty": -1e-320},
    {"logit_bias": {0: 1e-320}},
    {"temperature": 1e-30, "repetition_penalty": 0.01, "top_p": 1e-30, "typical_p": 1e-30, "min_p": 1e-40,
    "top_k": 10**30},
]  # fmt: skip


@pytest.mark.parametrize("fields", AT_LIMITS, ids=str)
def test_numbers_at_their_limits_leave_tokens_to_draw(fields: dict[str, Any]) -> None:
    logits = some_logits(ROWS, VOCAB, spread=300)
    out = sampling(logits, slots_of([slot_start(SamplingParams(**fields))]), [0] * ROWS, np.arange(ROWS))
    assert all(0 <= token < VOCAB for token in out.tokens)
    if list(fields) == ["top_p"]:
        assert out.tokens.tolist() == logits.argmax(axis=-1).tolist()


BEYOND = [
    ("temperature", 1e39), ("temperature", -1e-320), ("temperature", math.nan), ("temperature", math.inf),
    ("temperature", 10**400),
    ("top_p", -1e-320), ("top_p", 1e300), ("typical_p", 1e-46), ("min_p", -1e-320), ("min_p", math.nan),
    ("repetition_penalty", 1e-320), ("repetition_penalty", 1e-39), ("repetition_penalty", 1e39),
    ("repetition_penalty", 0.0),
    ("frequency_penalty", 1e300), ("presence_penalty", -math.inf), ("presence_penalty", math.nan),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BEYOND)
def test_numbers_that_the_device_cannot_hold_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is .*; it must be between "):
        SamplingParams(**{name: value})
    for bias in (1e39, math.nan):
        with pytest.raises(InvalidRequest, match=r"^logit_bias\[3\] is .*; it must be between -100 and 100"):
            SamplingParams(logit_bias={3: bias})


def test_infinities_that_penalties_make_fail_the_row() -> None:
    params = SamplingParams(repetition_penalty=0.01)
    logits = np.full((ROWS, VOCAB), 1e37, np.float32)
    out = sampling(logits, slots_of([slot_start(params), slot_start(GREEDY, slot=1)]), [0, 1] * 4, [0] * ROWS)
    assert out.tokens.tolist() == [NOTHING_LEFT, 0] * 4


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.1, top_k=2, logit_bias={3: 50})])
def test_logprobs_are_those_of_the_model_whatever_shapes_the_draw(params: SamplingParams) -> None:
    logits = some_logits(ROWS, VOCAB)
    out = sampling(logits, slots_of([slot_start(params)]), [0] * ROWS, np.arange(ROWS))
    for row in range(ROWS):
        expected = log_softmax(logits[row])
        best = np.argsort(-expected)[:MAX_LOGPROBS]
        np.testing.assert_allclose(out.logprobs[row], expected[out.tokens[row]], rtol=1e-5, atol=1e-5)
        assert out.top_ids[row].tolist() == best.tolist()
        np.testing.assert_allclose(out.top_logprobs[row], expected[best], rtol=1e-5, atol=1e-5)


def test_a_vocabulary_smaller_than_a_block_and_than_the_logprobs_works() -> None:
    logits = some_logits(ROWS, 5)
    out = sampling(logits, slots_of([slot_start(SamplingParams(top_p=0.9))]), [0] * ROWS, np.arange(ROWS))
    assert all(0 <= token < 5 for token in out.tokens)
    assert out.top_ids[0, :5].tolist() == np.argsort(-logits[0]).tolist()


def test_as_many_tokens_as_a_request_may_adjust_are_adjusted() -> None:
    """Half of them by a bias and half by min_tokens; numbers beyond what 32 bits hold mean as much as they can."""
    half = MAX_ADJUSTED_TOKENS // 2
    biases = dict.fromkeys(range(VOCAB + 10, VOCAB + 9 + half), 10.0) | {3: 10.0}
    ends = (4, *range(2 * VOCAB, 2 * VOCAB + half - 1))
    sampling_params = SamplingParams(temperature=0, logit_bias=biases, top_k=2**40)
    Request(0, (1,), 5, sampling_params, min_tokens=2**40, end_ids=ends)  # is not refused
    slots = slots_of([slot_start(sampling_params, min_tokens=2**40, end_ids=ends)])
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 4], logits[1:, 3] = 100, -20
    assert sampling(logits, slots, [0] * ROWS, [0] * ROWS).tokens.tolist() == [3] + [0] * (ROWS - 1)


def test_requests_that_adjust_more_tokens_or_none_there_can_be_are_refused() -> None:
    many = dict.fromkeys(range(MAX_ADJUSTED_TOKENS), 1.0)
    Request(0, (1,), 5, SamplingParams(logit_bias=many), end_ids=(1,))
    with pytest.raises(InvalidRequest, match="1025; it must be at most 1024"):
        Request(0, (1,), 5, SamplingParams(logit_bias=many), end_ids=(1,), min_tokens=1)
    with pytest.raises(InvalidRequest, match="a token of logit_bias is -1"):
        SamplingParams(logit_bias={-1: 1.0})
    for field in ("end_ids", "stop_ids"):
        with pytest.raises(InvalidRequest, match=f"a token of {field} is {2**31}"):
            Request(0, (1,), 5, **{field: (3, 2**31)})  # type: ignore[arg-type]
