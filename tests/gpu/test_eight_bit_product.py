"""Rows times e4m3 codes by the kernel, against the plain product in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.eight_bits import MOST_ROWS
from quire.ops.gpu.eight_bit_product import EightBitBlocks, blocks_of, eight_bit_product

pytestmark = pytest.mark.gpu
INTERPRET = jax.default_backend() != "gpu"
CODE = jnp.dtype("float8_e4m3fn")
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # of an 8B

kernel: Any = partial(eight_bit_product, interpret=INTERPRET)


def codes_of(outputs: int, inputs: int) -> jax.Array:
    """All of e4m3, those below the normal numbers among them."""
    bits = np.random.default_rng(0).integers(0, 256, (outputs, inputs))
    bits[(bits & 127) == 127] = 1  # NaN
    return jax.lax.bitcast_convert_type(jnp.asarray(bits, jnp.uint8), CODE)


def rows_of(count: int, inputs: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((count, inputs)) * 3.0, dtype)


def scales_of(outputs: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).uniform(1e-3, 1e-2, outputs), jnp.float32)


def right_of(x: jax.Array, codes: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(x, np.float64) @ np.asarray(codes, np.float64).T


def off(got: Any, right: np.ndarray[Any, Any]) -> float:
    assert got.shape == right.shape
    return float(np.linalg.norm(np.asarray(got, np.float64) - right) / np.linalg.norm(right))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 64, 256), (8, 96, 512), (9, 128, 640), (17, 40, 320), (32, 200, 1024)]
)
def test_the_product_is_that_of_the_widened_codes(rows: int, outputs: int, inputs: int, dtype: str) -> None:
    x, codes, scales = rows_of(rows, inputs, dtype), codes_of(outputs, inputs), scales_of(outputs)
    right = right_of(x, codes)
    assert off(jax.jit(kernel)(x, codes), right) < 1e-5
    scaled = jax.jit(partial(kernel, dtype=jnp.bfloat16))(x, codes, scales)
    assert scaled.dtype == jnp.bfloat16
    assert off(scaled, right * np.asarray(scales)) < 4e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_programs_share_the_inputs_of_few_outputs(rows: int, splits: int, dtype: str) -> None:
    x, codes, scales = rows_of(5, 1280, dtype), codes_of(64, 1280), scales_of(64)
    blocks = EightBitBlocks(rows=rows, columns=64, inputs=128, splits=splits, warps=4, stages=2)
    got = jax.jit(partial(kernel, blocks=blocks))(x, codes, scales)
    assert off(got, right_of(x, codes) * np.asarray(scales)) < 1e-5


@pytest.mark.parametrize("count", [8, 16, MOST_ROWS])
def test_a_rows_numbers_do_not_depend_on_the_others(count: int) -> None:
    codes, x = codes_of(64, 512), rows_of(count, 512)
    others = jnp.asarray(np.random.default_rng(3).standard_normal(x.shape) * 1e4, x.dtype)
    run: Any = jax.jit(kernel)
    among = np.asarray(run(x, codes))
    np.testing.assert_array_equal(np.asarray(run(others.at[5].set(x[5]), codes))[5], among[5])
    np.testing.assert_array_equal(np.asarray(run(others.at[3].set(jnp.nan).at[5].set(x[5]), codes))[5], among[5])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_code_is_widened_exactly(dtype: str) -> None:
    codes = codes_of(64, 256)
    x = jnp.eye(256, dtype=dtype)
    for first in range(0, 256, 8):
        got = jax.jit(kernel)(x[first : first + 8], codes)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(codes, np.float32).T[first : first + 8])


def test_large_numbers_of_rows_stay_what_they_are() -> None:
    x, codes = rows_of(8, 256) * jnp.bfloat16(1e30), codes_of(64, 256)
    assert off(jax.jit(kernel)(x, codes), right_of(x, codes)) < 1e-5


def test_an_8b_has_programs_for_the_whole_device() -> None:
    for outputs, inputs in SHAPES:
        for rows in (1, 8, 16, 32):
            blocks = blocks_of(rows, outputs, inputs)
            assert blocks.rows >= rows
            assert outputs // blocks.columns * blocks.splits >= 128
