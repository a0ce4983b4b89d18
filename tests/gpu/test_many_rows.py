"""Products of 72 to 256 rows in e4m3 that gate and round, or have scales of blocks, against products in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.rounded_rows import EPSILON, LARGEST_FLOAT8
from tests.gpu.test_code_product import (
    BLOCK,
    HAS_SCALES,
    IS_HOPPER,
    codes,
    product,
    rounded_blocks,
    runs,  # noqa: F401
    scales,
)

pytestmark = [pytest.mark.gpu, HAS_SCALES]
many_gated_codes = pytest.importorskip("quire.ops.gpu.many_gated_codes")
many_scaled_product = pytest.importorskip("quire.ops.gpu.many_scaled_product")
tiles_of: Any = pytest.importorskip("quire.ops.gpu.row_tiles").tiles_of


def gated(
    rows: jax.Array, of_rows: jax.Array, matrix: jax.Array, of_columns: jax.Array, dtype: Any = jnp.bfloat16
) -> Any:
    """The interpreter needs a thread of the machine for each group of a cluster: one of eight waits for ever on two
    cores."""
    blocks = many_gated_codes.many_gated_blocks_of(len(rows), len(matrix) // 2, rows.shape[1], dtype)
    if not IS_HOPPER and blocks.tiles.groups > 2:
        blocks = blocks._replace(pairs=False)
    return many_gated_codes.many_gated_codes(rows, of_rows, matrix, of_columns, dtype, blocks)


def scaled(rows: jax.Array, matrix: jax.Array, of_blocks: jax.Array) -> np.ndarray:
    """JAX does not interpret what programs put into each other's memory: there each has all inputs."""
    blocks = many_scaled_product.scaled_blocks_of(len(rows), *matrix.shape)
    if not IS_HOPPER:
        blocks = many_scaled_product.ScaledBlocks(tiles_of(len(rows), 1 + (len(rows) > 128), 2), 1, 3, len(rows) > 128)
    return np.asarray(many_scaled_product.many_scaled_product(rows, matrix, jnp.float32, of_blocks, blocks))


@pytest.mark.parametrize("num_rows", [72, 96, 128, 200, 256])
@pytest.mark.parametrize("shape", [(128, 512), *[(4096, 14336)] * IS_HOPPER], ids=str)
def test_sums_of_blocks_have_scales(shape: tuple[int, int], num_rows: int) -> None:
    rows, matrix, of_blocks = codes((num_rows, shape[1]), 1), codes(shape, 2), scales((shape[1] // BLOCK, num_rows), 3)
    numbers = rows.astype(jnp.float32) * jnp.repeat(of_blocks.T, BLOCK, axis=1)
    right, room = product(numbers, matrix), 2.0**-12 * product(jnp.abs(numbers), jnp.abs(matrix))
    got = scaled(rows, matrix, of_blocks)
    assert (np.abs(got - right) <= room).all()
    beside = scaled(rows, matrix, of_blocks.at[0, 5].set(jnp.nan))
    others = np.arange(num_rows) != 5
    assert np.isnan(beside[5]).all()
    np.testing.assert_array_equal(beside[others], got[others])


@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(72, jnp.float32), *[(rows, jnp.bfloat16) for rows in (128, 192, 200)]]
)
@pytest.mark.parametrize("shape", [(128, 512), (768, 512), *[(14336, 4096)] * IS_HOPPER], ids=str)
def test_gates_are_rounded_in_blocks(
    shape: tuple[int, int], num_rows: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, inputs = shape
    if numbers == 768:  # programs have several parts of the matrix
        monkeypatch.setattr(many_gated_codes, "MULTIPROCESSORS", 2)
    rows, matrix = codes((num_rows, inputs), 1), codes((2 * numbers, inputs), 2)
    of_rows, of_columns = scales((num_rows, 1), 3), scales((2 * numbers,), 4)
    right = rounded_blocks(product(rows, matrix) * of_rows * of_columns, dtype)
    got = gated(rows, of_rows, matrix, of_columns, dtype)
    np.testing.assert_allclose(np.asarray(got[1]), right.scales.T, rtol=2.0**-6)
    assert np.mean(np.asarray(got[0], np.float32) == np.asarray(right.codes, np.float32)) > 0.9
    own = np.asarray(got[0], np.float32) * np.repeat(np.asarray(got[1]).T, BLOCK, axis=1)
    reach = np.repeat(right.scales * LARGEST_FLOAT8, BLOCK, axis=1)
    assert (np.abs(own - np.asarray(right.values)) <= 0.05 * reach).all()


def test_gates_of_rows_do_not_touch_each_other() -> None:
    numbers, inputs = (14336, 4096) if IS_HOPPER else (256, 512)
    rows, matrix = codes((208, inputs), 1), codes((2 * numbers, inputs), 2)
    of_rows, of_columns = scales((208, 1), 3), scales((2 * numbers,), 4)
    alone = gated(rows, of_rows, matrix, of_columns)
    beside = gated(rows.at[5].set(jnp.nan).at[9].set(0), of_rows, matrix, of_columns)
    assert np.isnan(np.asarray(beside[0], np.float32)[5]).all()
    assert np.isnan(np.asarray(beside[1])[:, 5]).all()
    assert (np.asarray(beside[0], np.float32)[9] == 0).all()
    assert (np.asarray(beside[1])[:, 9] == EPSILON).all()
    others = ~np.isin(np.arange(208), (5, 9))
    np.testing.assert_array_equal(np.asarray(beside[0], np.float32)[others], np.asarray(alone[0], np.float32)[others])
    np.testing.assert_array_equal(np.asarray(beside[1])[:, others], np.asarray(alone[1])[:, others])
