"""Products of few rows in codes of e4m3, against products in float32: on a GPU that has them, and interpreted
elsewhere, where JAX does that: from 0.11 on."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.weights.rounded_rows import EPSILON, LARGEST_FLOAT8, RoundedRows, gated_values, round_rows
from tests.gpu.hopper import IS_HOPPER, ON_HOPPER

pytestmark = pytest.mark.gpu
mosaic = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
code_product = pytest.importorskip("quire.ops.gpu.hopper.code_product")
gated_codes = pytest.importorskip("quire.ops.gpu.hopper.gated_codes")

CODE = jnp.float8_e4m3fn
WHOLE = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 2048)]
HAS_SCALES = pytest.mark.skipif(not ON_HOPPER.mosaic, reason="this JAX has other kernels for it")
BLOCK = 128  # numbers of a row that have a scale
SMALL = [(64, 256), (192, 384), (256, 1536)]


@pytest.fixture(autouse=True)
def runs() -> Iterator[None]:
    if IS_HOPPER:
        yield
        return
    if jax.default_backend() == "gpu":
        pytest.skip("the kernel is for GPUs of compute capability 9.0")
    if not hasattr(mosaic, "force_gpu_interpret_mode"):
        pytest.skip("this JAX does not interpret kernels of Mosaic")
    with mosaic.force_gpu_interpret_mode():
        yield


def codes(shape: tuple[int, int], seed: int) -> jax.Array:
    """With sizes that differ by much from row to row."""
    chance = np.random.default_rng(seed)
    numbers = chance.normal(size=shape) * np.exp(chance.uniform(-4, 2, (shape[0], 1)))
    return jnp.asarray(numbers, jnp.float32).astype(CODE)


def product(rows: jax.Array, matrix: jax.Array) -> np.ndarray:
    return np.asarray(rows, np.float32) @ np.asarray(matrix, np.float32).T


@pytest.mark.parametrize("num_rows", [16, 24, 32, 48, 64])
@pytest.mark.parametrize("shape", SMALL + WHOLE * IS_HOPPER, ids=str)
def test_sums_are_those_of_the_numbers(shape: tuple[int, int], num_rows: int) -> None:
    rows, matrix = codes((num_rows, shape[1]), 1), codes(shape, 2)
    right = product(rows, matrix)
    # What a sum may lose: the device adds the products of a block with 13 bits.
    room = 2.0**-12 * product(jnp.abs(rows), jnp.abs(matrix))
    for dtype, last in ((jnp.float32, 0.0), (jnp.bfloat16, 2.0**-8)):
        got = np.asarray(code_product.code_product(rows, matrix, dtype), np.float32)
        assert (np.abs(got - right) <= room + last * np.abs(right)).all()


def test_rows_do_not_touch_each_other() -> None:
    """A row without numbers has sums that are none; the others have the bits that they have beside any row."""
    shape = (4096, 4096) if IS_HOPPER else (192, 384)
    rows, matrix = codes((32, shape[1]), 3), codes(shape, 4)
    alone = np.asarray(code_product.code_product(rows, matrix, jnp.float32))
    without = rows.at[5].set(jnp.nan)
    beside = np.asarray(code_product.code_product(without, matrix, jnp.float32))
    assert np.isnan(beside[5]).all()
    others = np.arange(32) != 5
    np.testing.assert_array_equal(beside[others], alone[others])


def scales(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jnp.asarray(np.exp(np.random.default_rng(seed).uniform(-3, 0, shape)), jnp.float32)


@HAS_SCALES
@pytest.mark.parametrize("num_rows", [16, 24, 64])
@pytest.mark.parametrize("shape", [(64, 512), (192, 1024), *[(4096, 14336)] * IS_HOPPER], ids=str)
def test_sums_of_blocks_have_scales(shape: tuple[int, int], num_rows: int) -> None:
    rows, matrix, of_blocks = codes((num_rows, shape[1]), 1), codes(shape, 2), scales((shape[1] // BLOCK, num_rows), 3)
    numbers = rows.astype(jnp.float32) * jnp.repeat(of_blocks.T, BLOCK, axis=1)
    right, room = product(numbers, matrix), 2.0**-12 * product(jnp.abs(numbers), jnp.abs(matrix))
    got = np.asarray(code_product.code_product(rows, matrix, jnp.float32, of_blocks))
    assert (np.abs(got - right) <= room).all()
    beside = np.asarray(code_product.code_product(rows, matrix, jnp.float32, of_blocks.at[0, 5].set(jnp.nan)))
    others = np.arange(num_rows) != 5
    assert np.isnan(beside[5]).all()
    np.testing.assert_array_equal(beside[others], got[others])


@HAS_SCALES
@pytest.mark.parametrize("dtype", [jnp.bfloat16, *[jnp.float32] * (not IS_HOPPER)])  # which no step asks for
@pytest.mark.parametrize("num_rows", [16, 24, 64])
@pytest.mark.parametrize("shape", [(128, 256), (256, 384), *[(14336, 4096)] * IS_HOPPER], ids=str)
def test_gates_are_rounded_in_blocks(shape: tuple[int, int], num_rows: int, dtype: Any) -> None:
    numbers, inputs = shape
    rows, matrix = codes((num_rows, inputs), 1), codes((2 * numbers, inputs), 2)
    of_rows, of_columns = scales((num_rows, 1), 3), scales((2 * numbers,), 4)
    right = rounded_blocks(product(rows, matrix) * of_rows * of_columns, dtype)
    got = gated_codes.gated_codes(rows, of_rows, matrix, of_columns, dtype)
    # A gate, an up and their product are each rounded to `dtype`; what sums lose may move each by one number, and the
    # codes with them.
    np.testing.assert_allclose(np.asarray(got[1]), right.scales.T, rtol=3 * 2.0**-7)
    assert np.mean(np.asarray(got[0], np.float32) == np.asarray(right.codes, np.float32)) > 0.95
    own = np.asarray(got[0], np.float32) * np.repeat(np.asarray(got[1]).T, BLOCK, axis=1)
    reach = np.repeat(right.scales * LARGEST_FLOAT8, BLOCK, axis=1)
    assert (np.abs(own - np.asarray(right.values)) <= 0.05 * reach).all()


@HAS_SCALES
def test_gates_of_rows_do_not_touch_each_other() -> None:
    numbers, inputs = (14336, 4096) if IS_HOPPER else (256, 256)
    rows, matrix = codes((32, inputs), 1), codes((2 * numbers, inputs), 2)
    of_rows, of_columns = scales((32, 1), 3), scales((2 * numbers,), 4)
    alone = gated_codes.gated_codes(rows, of_rows, matrix, of_columns, jnp.bfloat16)
    given = rows.at[5].set(jnp.nan).at[9].set(0)
    beside = gated_codes.gated_codes(given, of_rows, matrix, of_columns, jnp.bfloat16)
    assert np.isnan(np.asarray(beside[0], np.float32)[5]).all()
    assert np.isnan(np.asarray(beside[1])[:, 5]).all()
    assert (np.asarray(beside[0], np.float32)[9] == 0).all()
    assert (np.asarray(beside[1])[:, 9] == EPSILON).all()
    others = ~np.isin(np.arange(32), (5, 9))
    np.testing.assert_array_equal(np.asarray(beside[0], np.float32)[others], np.asarray(alone[0], np.float32)[others])
    np.testing.assert_array_equal(np.asarray(beside[1])[:, others], np.asarray(alone[1])[:, others])


def rounded_blocks(both: np.ndarray, dtype: Any) -> RoundedRows:
    """Gates and ups [t, 2 * m], gated, and rounded with a scale for each block of a row."""
    active = gated_values(jax.nn.silu, jnp.asarray(both).reshape(len(both), 1, 2, -1)).astype(dtype)
    rounded = round_rows(active.reshape(-1, BLOCK), CODE)
    by_row = (len(both), -1)
    return RoundedRows(active.astype(jnp.float32), rounded.codes.reshape(by_row), rounded.scales.reshape(by_row))
