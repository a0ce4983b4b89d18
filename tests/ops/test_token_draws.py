"""Tokens drawn by the kernels, beside the same draw in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.gpu.token_draws import draw_tokens
from quire.ops.sampling_kernels import BLOCK, Drawn
from tests.gpu.test_kernels import INTERPRET
from tests.ops.test_gpu_lowering import on_an_h200

Array = np.ndarray[Any, Any]
NEAR = 1e-4  # of a share: what sums in float32 may be off by


def drawn(logits: Array, temperature: Array, uniform: Array) -> Drawn:
    given = (jnp.asarray(one, jnp.float32) for one in (logits, temperature, uniform))
    return Drawn(*map(np.asarray, jax.jit(partial(draw_tokens, interpret=INTERPRET))(*given)))


def picked(weights: Array, uniform: float) -> tuple[int, bool]:
    """The first place beyond a share, and whether that is beyond doubt."""
    running = np.cumsum(weights) / weights.sum()
    place = int(np.flatnonzero((running > uniform) & (weights > 0))[0])
    return place, bool(np.abs(running - uniform).min() > NEAR)


def right_token(logits: Array, temperature: float, uniform: Array) -> tuple[int, bool]:
    wide = logits.astype(np.float64)
    with np.errstate(under="ignore"):
        weights = np.exp((wide - wide.max()) / temperature)
    blocks = np.pad(weights, (0, -len(weights) % BLOCK)).reshape(-1, BLOCK)
    block, is_sure = picked(blocks.sum(axis=1), uniform[0])
    token, is_sure_within = picked(blocks[block], uniform[1])
    return block * BLOCK + token, is_sure and is_sure_within


@given(
    size=st.sampled_from([1, 2, 255, 256, 257, 2047, 2048, 2049, 5000]),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.0, 1.0, 5.0, 60.0]),
)
def test_tokens_are_those_of_float64(size: int, seed: int, spread: float) -> None:
    chance = np.random.default_rng(seed)
    logits = (chance.normal(size=(4, size)) * spread + chance.normal() * 50).astype(np.float32)
    logits[1, chance.random(size) < 0.5] = -np.inf
    logits[1, chance.integers(size)] = logits[2, 0]
    temperature, uniform = chance.choice([0.1, 0.7, 1.0, 3.0], 4), chance.random((4, 2), np.float32) * (1 - 2**-24)
    found = drawn(logits, temperature, uniform)
    np.testing.assert_array_equal(found.likeliest, logits.argmax(axis=1))
    np.testing.assert_array_equal(found.highest, logits.max(axis=1))
    for row in range(4):
        token, is_sure = right_token(logits[row], temperature[row], uniform[row])
        assert found.tokens[row] == token or not is_sure
        assert logits[row, found.tokens[row]] > -np.inf


def test_tokens_have_their_probabilities() -> None:
    count, size = 20_000, 600
    logits = np.random.default_rng(0).normal(size=size) * 2
    weights = np.exp((logits - logits.max()) / 0.8)
    uniform = np.random.default_rng(1).random((count, 2), np.float32)
    found = drawn(np.broadcast_to(logits, (count, size)), np.full(count, 0.8), uniform)
    expected = weights / weights.sum() * count
    seen = np.bincount(found.tokens, minlength=size)
    often = expected >= 5
    square = ((seen - expected)[often] ** 2 / expected[often]).sum()
    assert square < often.sum() + 5 * np.sqrt(2 * often.sum())


@pytest.mark.parametrize("rows", [1, 256])
def test_they_are_translated_for_gpus(rows: int) -> None:
    given = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 128256), (rows,), (rows, 2)))
    with on_an_h200():
        text = jax.jit(draw_tokens).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call") == 2


@pytest.mark.parametrize("temperature", [2.0**-126, 1e-3, 1e30])
def test_no_temperature_makes_other_than_tokens(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=(3, 700)) * 1e4
    logits[1, ::2] = -np.inf
    found = drawn(logits, np.full(3, temperature), np.full((3, 2), 0.5))
    if temperature < 1:
        np.testing.assert_array_equal(found.tokens, logits.argmax(axis=1))
    assert (logits[np.arange(3), found.tokens] > -np.inf).all()


def test_a_row_without_numbers_shows_and_touches_no_other() -> None:
    chance = np.random.default_rng(2)
    logits, uniform = chance.normal(size=(6, 3000)).astype(np.float32), chance.random((6, 2), np.float32)
    alone = [drawn(logits[row : row + 1], np.ones(1), uniform[row : row + 1]) for row in range(6)]
    logits[1, 2999], logits[2, 5], logits[3], logits[4] = np.nan, np.inf, -np.inf, np.nan
    found = drawn(logits, np.ones(6), uniform)
    assert np.isfinite(found.highest).tolist() == [True, False, False, False, False, True]
    for row in (0, 5):
        for one, whole in zip(alone[row], found, strict=True):
            assert one[0] == whole[row]
