"""The sampler with the native kernels draws the tokens that it draws without them."""

from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.executor.sample.sampler import NOT_NUMBERS, NOTHING_LEFT, Features, sample
from quire.executor.slots import Slots
from quire.ops.kernels import NATIVE
from quire.ops.native import library
from quire.request import SamplingParams
from tests.executor.sampling import Sampling, sampling, slot_start, slots_of
from tests.executor.test_filters import primitives

Array = np.ndarray[Any, Any]
VOCAB, ROWS = 1003, 8
WORDS = -(-VOCAB // 32)
GREEDY = SamplingParams(temperature=0)

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not library.load(), reason="not a CPU, or there is no C++ compiler"
)
native = Sampling(NATIVE)


def assert_alike(
    logits: Array, slots: Slots, masks: Array | None = None, off: Any = (), positions: Any = None
) -> Array:
    """The tokens, which are those of the plain sampler, with their log-probabilities."""
    positions = np.arange(ROWS) + 5 if positions is None else positions
    found, expected = (how(logits, slots, np.arange(ROWS), positions, masks, off) for how in (native, sampling))
    assert found.tokens.tolist() == expected.tokens.tolist()
    for one, other in zip(found[1:4], expected[1:4], strict=True):
        np.testing.assert_array_equal(one, other)
    return np.asarray(found.tokens)


def some_logits(seed: int, spread: float = 2.0) -> Array:
    return np.random.default_rng(seed).normal(0, spread, (ROWS, VOCAB)).astype(np.float32)


def some_masks(seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 2**32, (ROWS, WORDS), np.uint32)


PENALISED: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.4}
# A share of the mass may be reached by another token where sums are rounded otherwise, so most rows have other filters.
ROWS_OF_PARAMS = {
    "greedy": [GREEDY],
    "temperature": [SamplingParams(temperature=t) for t in (0.3, 1.0, 3.0)],
    "mixed": [GREEDY, SamplingParams(), SamplingParams(temperature=0.5, top_k=20)],
    "filtered": [SamplingParams(top_k=20), SamplingParams(top_p=0.7), SamplingParams(min_p=0.1), SamplingParams()],
    "all filters": [SamplingParams(top_k=60, top_p=0.9, min_p=0.02, typical_p=0.8), SamplingParams(typical_p=0.5)],
    "penalised": [SamplingParams(temperature=0, **PENALISED), SamplingParams(logit_bias={3: 9.0}, **PENALISED), GREEDY],
    "penalised and filtered": [SamplingParams(top_k=9, temperature=1.4, **PENALISED), SamplingParams(min_p=0.2)],
}


def slots_for(kinds: list[SamplingParams], seed: int = 0) -> Slots:
    rng = np.random.default_rng(seed)
    starts = []
    for slot in range(ROWS):
        prompt, answer = (tuple(rng.integers(0, VOCAB, count).tolist()) for count in (3, slot + 2))
        start = slot_start(kinds[slot % len(kinds)], slot, seed=slot, prompt=prompt, generated=answer)
        starts.append(start._replace(min_tokens=9, end_ids=(2, 3)) if slot % 3 == 0 else start)
    return slots_of(starts)


CHANGES = ("penalties", "adjustments", "masks")
SOME_OFF = [
    tuple(name for name, is_off in zip(CHANGES, off, strict=True) if is_off) for off in product([0, 1], repeat=3)
]


@pytest.mark.parametrize("name", ROWS_OF_PARAMS)
def test_tokens_are_those_of_the_plain_sampler(name: str) -> None:
    """Whatever of it a step says is asked for."""
    for seed, off in enumerate(SOME_OFF):
        slots = slots_for(ROWS_OF_PARAMS[name], seed)
        assert_alike(some_logits(seed), slots, some_masks(seed), off)
        assert_alike(some_logits(seed), slots, some_masks(seed), (*off, "filters", "logprobs"))


@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.0, 0.5, 3.0, 50.0]), rounded=st.booleans())
@settings(max_examples=25)
def test_tokens_of_ties_and_of_any_spread_are_those_of_the_plain_sampler(
    seed: int, spread: float, rounded: bool
) -> None:
    logits = some_logits(seed, spread)
    kinds = [GREEDY, SamplingParams(), SamplingParams(top_k=7), SamplingParams(min_p=0.3, temperature=0.7)]
    assert_alike(np.round(logits) if rounded else logits, slots_for(kinds, seed), some_masks(seed))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=9, top_p=0.9, typical_p=0.9)])
@pytest.mark.parametrize("off", [(), CHANGES])
def test_rows_without_numbers_and_rows_with_nothing_left_fail_alone(
    params: SamplingParams, off: tuple[str, ...]
) -> None:
    logits = some_logits(0)
    logits[1, 5], logits[2, 299], logits[4], logits[5], logits[6, ::2] = np.nan, np.inf, -np.inf, np.nan, -np.inf
    masks = np.full((ROWS, WORDS), 0xFFFFFFFF, np.uint32)
    masks[[1, 7]], masks[1, 0] = 0, 1 << 6 | 1 << 7  # which hides the NaN
    tokens = assert_alike(logits, slots_for([params]), masks, (*off, "logprobs"))
    assert tokens[[1, 2, 4, 5]].tolist() == [NOT_NUMBERS] * 4
    assert (tokens[7] == NOTHING_LEFT) == (not off)
    assert all(0 <= token < VOCAB for token in tokens[[0, 3, 6]])


def test_infinities_that_penalties_make_fail_the_row() -> None:
    slots = slots_for([SamplingParams(temperature=0, repetition_penalty=0.01), GREEDY])
    logits = np.full((ROWS, VOCAB), 1e37, np.float32)
    assert assert_alike(logits, slots, off=("adjustments", "logprobs")).tolist() == [NOTHING_LEFT, 0] * 4


@pytest.mark.parametrize("rows", [3, 4, 7, 8])
def test_rows_that_count_get_the_same_tokens_however_many_do(rows: int) -> None:
    """Padding, which has numbers of other steps, is not read; parts of a few rows need not divide them."""
    slots = slots_for([SamplingParams(), SamplingParams(top_k=20), GREEDY])
    features = Features(*(np.asarray(name == "filters") for name in Features._fields))
    logits, at, masks = some_logits(0)[:rows], np.arange(rows), some_masks(0)[:rows]

    @jax.jit
    def tokens(logits: Any, count: Any) -> Any:
        how: Any = {"kernels": NATIVE.sampling, "num_rows": count}
        return sample(logits, slots, at, at, masks, features, **how).tokens

    expected = sampling(some_logits(0), slots, np.arange(ROWS), np.arange(ROWS), off=(*CHANGES, "logprobs")).tokens
    for count in range(1, rows + 1):
        padded = np.where(np.arange(rows)[:, None] < count, logits, np.nan)
        assert tokens(padded, np.int32(count))[:count].tolist() == expected[:count].tolist()
    assert not np.array_equal(tokens(np.flip(logits, axis=1), np.int32(rows)), expected[:rows])


def test_a_step_that_changes_nothing_copies_no_logits() -> None:
    """No branch gives logits back but those within the branch that changes them."""
    rows = np.zeros(ROWS, int)
    features = Features(*(np.asarray(False) for _ in Features._fields))
    by_kernels = partial(sample, kernels=NATIVE.sampling)
    traced = jax.make_jaxpr(by_kernels)(some_logits(0), slots_for([GREEDY]), rows, rows, some_masks(0), features)
    found = primitives(traced.jaxpr)
    assert "sort" not in {name for name, _ in found}
    assert [inside for name, inside in found if name in ("scatter-add", "top_k", "exp", "log") and not inside] == []
    of_logits = [equation.outvars for equation in traced.jaxpr.eqns if equation.primitive.name == "cond"]
    assert len(of_logits) == 2  # to choose, and log-probabilities
    assert all(out.aval.shape != (ROWS, VOCAB) for outs in of_logits for out in outs)
    assert "ffi_call" in {name for name, inside in found if inside}
