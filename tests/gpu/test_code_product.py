"""Products of few rows in codes of e4m3, against products in float32: on a GPU that has them, and interpreted
elsewhere, where JAX does that: from 0.11 on."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.executor.compute_capability import compute_capability
from quire.ops.gpu import kernels as gpu_kernels

pytestmark = pytest.mark.gpu
mosaic = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
code_product = pytest.importorskip("quire.ops.gpu.code_product")

CODE = jnp.float8_e4m3fn
IS_HOPPER = jax.default_backend() == "gpu" and compute_capability(jax.devices()[0]) == gpu_kernels.HOPPER
WHOLE = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 2048)]
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
