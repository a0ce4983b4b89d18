"""Blocks of a product of few rows with four-bit weights, and models that ask for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.models.projection import project, project_sums
from quire.ops.adapters import AdaptedWeight, AdapterStack, add_products
from quire.ops.four_bits import PLACES, FourBits
from quire.ops.rounded_rows import RoundingOps, scaled
from tests.gpu.test_four_bit_product import coded, rows_of, turned

four_bit_rows = pytest.importorskip("quire.ops.gpu.four_bit_rows")
IN_PROGRAM = 227 << 10  # bytes of shared memory that a program may have


@given(
    rows=st.integers(1, 70),
    tiles=st.integers(1, 500),
    steps=st.integers(1, 120),
    group=st.sampled_from([16, 32, 64, 128, 256, 512, 1024]),
)
def test_blocks_fit_and_have_all_inputs_and_few_more(rows: int, tiles: int, steps: int, group: int) -> None:
    run = min(max(group // PLACES, 16), 64)
    outputs, inputs = 64 * tiles, steps * max(PLACES * run, group)
    blocks = four_bit_rows.blocks_of(rows, outputs, inputs, group, run)
    by_warp = rows <= 16
    if blocks is None:
        assert rows > 64 or (rows > 8 and rows % 8) or (not by_warp and group % (PLACES * run))
        return
    width, sources = blocks.steps * PLACES * run, blocks.splits * blocks.groups
    assert outputs % blocks.outputs == 0
    count = -(-inputs // (width * sources))
    assert count * width * sources <= 1.15 * inputs
    assert width % group == 0 or group % width == 0
    assert 1 <= blocks.ahead <= count
    assert (8 * blocks.outputs // 64) % sources == 0  # each group adds some halves of tiles
    rows = max(rows, 8)
    of_block = width * (blocks.outputs // 2 + 2 * rows) + max(1, width // group) * blocks.outputs * 4
    parts = blocks.outputs * rows * 4 if sources > 1 else 0
    assert blocks.groups * (blocks.ahead * of_block + parts) <= IN_PROGRAM


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("shape", [(3584, 18944), (2560, 9728), (5120, 13824), (7168, 5120), (4608, 3584)], ids=str)
def test_inputs_that_two_does_not_divide_often_have_large_blocks(shape: tuple[int, int], rows: int) -> None:
    blocks = four_bit_rows.blocks_of(rows, *shape, 128, 32)
    assert blocks is not None
    assert blocks.steps >= 2


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], ids=str)
def test_an_8b_has_programs_for_most_of_the_device(shape: tuple[int, int], rows: int) -> None:
    blocks = four_bit_rows.blocks_of(rows, *shape, 128, 32)
    assert blocks is not None
    assert shape[0] // blocks.outputs * blocks.splits >= 96


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_model_takes_the_kernel_for_the_rows_that_it_is_for(has_adapters: bool, has_bias: bool) -> None:
    """With biases, and with what adapters add, as without it. Other rows are multiplied as before."""
    base, asked = turned(coded(64, 512, 128, has_zeros=True)), []

    def kernel(x: jax.Array, weight: FourBits, dtype: Any) -> jax.Array | None:
        asked.append((x.shape, dtype))
        return weight.widened_product(x).astype(dtype) if len(x) <= 4 else None

    bias = jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16) if has_bias else None
    for count, dtype in ((3, "bfloat16"), (5, "float32")):  # no CPU has the other kernel for bfloat16
        x, weight = rows_of(count, 512, dtype), base
        if has_adapters:
            a, b = (jnp.asarray(np.random.default_rng(n).normal(size=s), "bfloat16")
                    for n, s in enumerate(((1, 1, 4, 512), (1, 4, 64))))  # fmt: skip
            stack = AdapterStack(a, b, jnp.full(1, 4, jnp.int32), ((64, 0),))
            weight = AdaptedWeight(base, stack, jnp.ones(count, jnp.int32), add_products)
        got = scaled(project_sums("td,md->tm", x, weight, bias, RoundingOps(four_bits=kernel)))
        plain = project("td,md->tm", x.astype(jnp.float32), weight, bias)
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(jnp.float32), plain, rtol=0.02, atol=0.02 * float(jnp.abs(plain).max()))
    is_whole = not has_bias and not has_adapters
    assert asked == [((3, 512), jnp.bfloat16 if is_whole else jnp.float32), ((5, 512), jnp.float32)]
