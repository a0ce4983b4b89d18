"""Rows in codes with a scale for each block: their numbers, and the product that reads them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.weights.activation_rounding import Rounding
from quire.ops.weights.coded import Coded
from quire.ops.weights.products import project_sums
from quire.ops.weights.rounded_rows import BlockRows, CodeProduct, ProductKernels, scaled, values

CODE = jnp.float8_e4m3fn
TOKENS, INPUTS, OUTPUTS, BLOCK = 16, 64, 24, 16


def rows() -> BlockRows:
    chance = np.random.default_rng(0)
    codes = jnp.asarray(chance.normal(size=(TOKENS, INPUTS)) * 50, jnp.float32).astype(CODE)
    scales = jnp.asarray(np.exp(chance.uniform(-3, 3, (INPUTS // BLOCK, TOKENS))), jnp.float32)
    return BlockRows(codes, scales, jnp.dtype("float32"))


def test_each_block_has_its_scale() -> None:
    given = rows()
    found = np.asarray(values(given))
    for token, block in ((0, 0), (5, 3), (15, 1)):
        those = slice(block * BLOCK, (block + 1) * BLOCK)
        expected = given.codes[token, those].astype(jnp.float32) * given.scales[block, token]
        np.testing.assert_array_equal(found[token, those], expected)
    assert (len(given), given.dtype) == (TOKENS, jnp.float32)


def test_a_product_is_given_the_scales_and_rows_have_no_other() -> None:
    chance, asked = np.random.default_rng(1), []

    def multiply(codes: jax.Array, matrix: jax.Array, dtype: Any, scales: jax.Array | None) -> jax.Array:
        assert scales is not None
        asked.append(scales.shape)
        numbers = values(BlockRows(codes, scales, jnp.dtype("float32")))
        return (numbers @ matrix.astype(jnp.float32).T).astype(dtype)

    kernel = CodeProduct(lambda num_rows, codes, num_contracted: num_rows == TOKENS, multiply)
    weight = Coded(
        codes=jnp.asarray(chance.normal(size=(OUTPUTS, INPUTS)), jnp.float32).astype(CODE),
        scales=jnp.asarray(np.exp(chance.normal(size=(OUTPUTS, 1))), jnp.float32), zeros=None, index=None,
        input_scale=None, input_zero=None, shape=(OUTPUTS, INPUTS), num_contracted=1, is_of_experts=False, bits=8,
        group=INPUTS, rounding=Rounding(is_float=True), is_direct=True,
    )  # fmt: skip
    given = rows()
    got = scaled(project_sums("tm,dm->td", given, weight, None, ProductKernels(product=kernel)))
    expected = np.asarray(values(given)) @ (np.asarray(weight.codes, np.float32) * np.asarray(weight.scales)).T
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert asked == [(INPUTS // BLOCK, TOKENS)]
