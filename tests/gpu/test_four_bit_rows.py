"""Few rows times four-bit weights by the kernel for Hopper, against products in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.executor.compute_capability import compute_capability
from quire.ops.coded import Coded
from quire.ops.four_bits import FourBits
from quire.ops.gpu import hopper_products
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu.mosaic import HAS_MOSAIC

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu" or compute_capability(jax.devices()[0]) != gpu_kernels.HOPPER or not HAS_MOSAIC,
        reason="the kernel is for GPUs of compute capability 9.0; nothing interprets its instructions",
    ),
]
OF_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
SMALL = [(64, 1024), (256, 1536), (256, 1920), (3584, 18944)]  # of the last two, blocks end beyond the inputs
multiply = jax.jit(hopper_products.multiply_four_bits, static_argnums=2)


def rows_of(count: int, inputs: int, dtype: str) -> jax.Array:
    """With sizes that differ by much from row to row."""
    chance = np.random.default_rng(count)
    return jnp.asarray(chance.normal(size=(count, inputs)) * np.exp(chance.uniform(-4, 4, (count, 1))), dtype)


def four_bits(outputs: int, inputs: int, group: int, scale: str, *, has_zeros: bool) -> FourBits:
    chance = np.random.default_rng(inputs)
    scales = (outputs, inputs // group)
    weight = Coded(
        codes=jnp.asarray(chance.integers(0, 256, (outputs, inputs // 2)), jnp.uint8),
        scales=jnp.asarray(np.exp(chance.uniform(-6, 0, scales)), scale),
        zeros=jnp.asarray(chance.integers(0, 17, scales), jnp.int8) if has_zeros else None,
        index=None, input_scale=None, input_zero=None, shape=(outputs, inputs), num_contracted=1,
        is_of_experts=False, bits=4, group=group,
    )  # fmt: skip
    found = FourBits.of(weight)
    assert found is not None
    return found


def plain(x: jax.Array, weight: FourBits) -> jax.Array:
    wide = weight.rows(jnp.arange(weight.shape[0]))
    return jnp.einsum("ti,oi->to", x.astype(jnp.float32), wide, precision=jax.lax.Precision.HIGHEST)


def assert_near(got: jax.Array, right: jax.Array, dtype: Any) -> None:
    """Row by row, which differ in size."""
    assert got.dtype == dtype
    got, right = np.asarray(got, np.float64), np.asarray(right, np.float64)
    off = np.linalg.norm(got - right, axis=1) / np.linalg.norm(right, axis=1)
    assert (off <= (1e-5 if dtype == jnp.float32 else 2.0 ** -(jnp.finfo(dtype).nmant + 1))).all()


@pytest.mark.parametrize(
    ("group", "dtype", "shape", "rows"),
    [
        *((128, "bfloat16", shape, rows) for shape in [*SMALL, *OF_8B] for rows in (1, 16, 64)),
        *((group, "float16", (256, 1536), rows) for group in (32, 64, 512) for rows in (3, 8, 32)),
    ],
)
def test_four_bits(shape: tuple[int, int], rows: int, group: int, dtype: str) -> None:
    x, weight = rows_of(rows, shape[1], dtype), four_bits(*shape, group, dtype, has_zeros=dtype == "bfloat16")
    got = multiply(x, weight, jnp.float32)
    if got is None:
        assert (rows, group) == (32, 32)  # more rows have a kernel for whole groups
        return
    assert_near(got, plain(x, weight), jnp.float32)


@pytest.mark.parametrize("rows", [3, 8, 16, 64])
def test_rows_do_not_touch_each_other(rows: int) -> None:
    """A row without numbers has sums that are none; the others have the bits that they have beside any row."""
    weight = four_bits(4096, 4096, 128, "bfloat16", has_zeros=True)
    x = rows_of(rows, 4096, "bfloat16")
    alone, beside = (np.asarray(multiply(one, weight, jnp.float32)) for one in (x, x.at[1].set(jnp.nan)))
    assert np.isnan(beside[1]).all()
    others = np.arange(rows) != 1
    np.testing.assert_array_equal(beside[others], alone[others])


def test_a_row_has_the_same_bits_among_up_to_eight() -> None:
    x, weight = rows_of(8, 4096, "bfloat16"), four_bits(6144, 4096, 128, "bfloat16", has_zeros=True)
    together = np.asarray(multiply(x, weight, jnp.float32))
    for count in (1, 2, 5):
        np.testing.assert_array_equal(multiply(x[:count], weight, jnp.float32), together[:count])


@pytest.mark.parametrize("shape", OF_8B, ids=str)
def test_sums_are_rounded_once(shape: tuple[int, int]) -> None:
    x, weight = rows_of(8, shape[1], "bfloat16"), four_bits(*shape, 128, "bfloat16", has_zeros=True)
    wide, rounded = (multiply(x, weight, jnp.dtype(dtype)) for dtype in ("float32", "bfloat16"))
    np.testing.assert_array_equal(rounded, wide.astype(jnp.bfloat16))
