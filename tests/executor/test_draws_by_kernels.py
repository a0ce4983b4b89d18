"""Tokens that the sampler has from kernels that draw are those that it has without them, and so are its errors."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.executor.sample.sampler import NOT_NUMBERS, NOTHING_ASKED, NOTHING_LEFT, Features, sample
from quire.ops.gpu.filter_cuts import filter_cuts
from quire.ops.gpu.token_draws import draw_tokens
from quire.ops.sampling_kernels import NONE, SamplingKernels
from quire.request import SamplingParams
from tests.executor.sampling import slot_start, slots_of

Array = np.ndarray[Any, Any]
DRAWS = SamplingKernels(draw_tokens=partial(draw_tokens, interpret=True))
CUTS = partial(filter_cuts, interpret=True)
KERNELS = {"none": NONE, "draws": DRAWS, "cuts and draws": DRAWS._replace(filter_cuts=CUTS)}
ROWS, VOCAB = 8, 300
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7, temperature=0.5),
    SamplingParams(min_p=0.1),
    SamplingParams(typical_p=0.5),
    SamplingParams(temperature=0, top_k=5),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={3: 4.0, 299: -5.0}),
]
SLOTS = slots_of([slot_start(params, slot, seed=7 * slot) for slot, params in enumerate(KINDS)])
PLACES = np.arange(ROWS)
FILTERS = NOTHING_ASKED._replace(filters=True)
CHANGES = NOTHING_ASKED._replace(penalties=True, adjustments=True, masks=True)


@cache
def program(kernels: str, features: Features | None) -> Any:
    """With features that are known when it is compiled, or that are given."""

    def run(logits: jax.Array, masks: jax.Array | None, given: list[jax.Array]) -> jax.Array:
        asked = features or Features(*given)
        how: dict[str, Any] = {"branches": features is None, "kernels": KERNELS[kernels]}
        return sample(logits, SLOTS, jnp.asarray(PLACES), jnp.asarray(PLACES + 20), masks, asked, **how).tokens

    return jax.jit(run)


def some_logits(name: str) -> Array:
    logits = (np.random.default_rng(0).normal(size=(ROWS, VOCAB)) * 3).astype(np.float32)
    if name == "ties":
        return np.round(logits)
    if name.startswith("all "):
        logits[:] = float(name.removeprefix("all "))
    elif name != "plain":
        logits[:, 150] = float(name)
    return logits


@pytest.mark.parametrize("kernels", ["draws", "cuts and draws"])
@pytest.mark.parametrize("name", ["plain", "ties", "nan", "inf", "-inf", "all -inf", "all nan"])
def test_tokens_and_errors_are_the_same(name: str, kernels: str) -> None:
    logits = some_logits(name)
    for features in (NOTHING_ASKED, FILTERS):
        found, expected = (program(one, features)(logits, None, []) for one in (kernels, "none"))
        np.testing.assert_array_equal(found, expected)
    masks = np.random.default_rng(1).integers(0, 2**32, (ROWS, -(-VOCAB // 32)), np.uint32)
    masks[1], masks[2, 0] = 0, 0  # nothing is left of one row, and the first tokens of another are forbidden
    for features in (NOTHING_ASKED, FILTERS, CHANGES, CHANGES._replace(filters=True)):
        given = [np.asarray(flag) for flag in features]
        found, expected = (np.asarray(program(one, None)(logits, masks, given)) for one in (kernels, "none"))
        np.testing.assert_array_equal(found, expected)
        is_number = np.isfinite(logits.max(axis=1))
        assert ((found == NOT_NUMBERS) == ~is_number).all()
        if features.masks and is_number.all():
            assert found[1] == NOTHING_LEFT


def test_a_row_is_drawn_alike_beside_rows_that_have_filters() -> None:
    plain, cut = SamplingParams(temperature=0.9), SamplingParams(top_k=3)
    logits = some_logits("plain")

    def tokens(params: list[SamplingParams], features: Features) -> Array:
        slots = slots_of([slot_start(one, slot, seed=slot) for slot, one in enumerate(params)])
        run = partial(sample, features=features, branches=False, kernels=DRAWS, masks=None)
        return np.asarray(jax.jit(run)(logits, slots, PLACES, PLACES + 20).tokens)

    alone, beside = tokens([plain] * ROWS, NOTHING_ASKED), tokens([plain, cut] * (ROWS // 2), FILTERS)
    np.testing.assert_array_equal(alone[::2], beside[::2])
    best = np.argsort(-logits, axis=1)[:, :3]
    assert all(beside[row] in best[row] for row in range(1, ROWS, 2))
