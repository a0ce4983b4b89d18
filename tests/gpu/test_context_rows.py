"""A product that puts the parts of its row together has the bits of one whose row was put together before."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.few_rows import PartedRows
from quire.ops.gpu.parts import Parts, combine_parts
from tests.gpu import test_few_rows as plain
from tests.gpu.test_few_rows import OFFSET, residual_of, weight_of

pytestmark = plain.pytestmark
MOST = 16
SHAPES = [(4096, 4096), (128, 1024), (256, 3584), (64, 512), (384, 1920)]  # of the last, blocks end beyond the inputs
CODES = ["int4", "float8_e4m3fn", "int8"]


def parted(count: int, inputs: int, size: int, dtype: str, seed: int = 0) -> PartedRows:
    """With exponents that are far apart. Parts that are not there were never written, and so is a whole that is not."""
    chance, heads = np.random.default_rng(seed), (inputs // size // 2, 2)
    shape = MOST, 1, *heads
    outs = chance.normal(size=(*shape, size)) * np.exp(chance.uniform(-3, 3, (1, 1, *heads, 1)))
    highest, totals = chance.uniform(-12, 12, shape), chance.uniform(1, 300, shape)
    for one in (outs, highest, totals):
        one[count:] = np.nan
    whole = np.full((1, *heads, size), np.nan) if count != 1 else chance.normal(size=(1, *heads, size))
    arrays = (jnp.asarray(one, jnp.float32) for one in (outs, highest, totals))
    return PartedRows(jnp.asarray(whole, dtype), jnp.full(1, count, jnp.int32), *arrays, together)


def together(rows: PartedRows) -> jax.Array:
    return combine_parts(rows.whole, rows.counts, Parts(rows.outs, rows.highest, rows.totals))


def sums(x: jax.Array | PartedRows, weight: Any) -> jax.Array:
    from quire.ops.gpu import few_rows

    return few_rows.sums(x, weight, jnp.dtype("float32"))


def flat(x: PartedRows) -> jax.Array:
    return x.values.reshape(1, -1)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("code", CODES)
def test_sums_have_the_same_bits(code: str, shape: tuple[int, int], count: int) -> None:
    from quire.ops.gpu import few_rows

    weight, size = weight_of(code, shape), 64 if shape[1] % 256 else 128
    assert few_rows.fits_parts(size, 1, jnp.bfloat16, weight)
    x = parted(count, shape[1], size, "bfloat16")
    got, right = np.asarray(sums(x, weight)), np.asarray(sums(flat(x), weight))
    assert np.isfinite(right).all()
    assert (count == 0) == (right == 0).all()
    np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(4))
def test_what_follows_has_the_same_bits(seed: int, dtype: str) -> None:
    from quire.ops.gpu import few_rows

    weight, x = weight_of("float8_e4m3fn", (4096, 4096)), parted(3 + seed, 4096, 128, dtype, seed)
    residual, norm = residual_of(1, 4096, dtype)
    for got, right in zip(
        few_rows.added(x, weight, residual, norm, OFFSET),
        few_rows.added(flat(x), weight, residual, norm, OFFSET),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(right, np.float32))


@pytest.mark.parametrize("field", ["outs", "highest", "totals"])
def test_a_part_without_numbers_shows(field: str) -> None:
    x = parted(4, 1024, 128, "bfloat16")
    x = replace(x, **{field: getattr(x, field).at[2].set(jnp.nan)})
    assert np.isnan(np.asarray(sums(x, weight_of("int4", (128, 1024))))).all()
