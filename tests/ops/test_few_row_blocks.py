"""Blocks of products of few rows with codes, and models that ask for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.weights.adapters import AdaptedWeight, AdapterStack, add_products
from quire.ops.weights.deferred import FewRows, FewRowsIn
from quire.ops.weights.four_bits import PLACES, FourBits
from quire.ops.weights.products import project, project_sums
from quire.ops.weights.rounded_rows import ProductKernels, scaled
from tests.gpu.test_four_bit_product import coded, rows_of, turned

few_row_blocks = pytest.importorskip("quire.ops.gpu.hopper.few_row_blocks")
IN_PROGRAM = 227 << 10  # bytes of shared memory that a program may have
OF_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


def assert_sound(blocks: Any, rows: int, shape: tuple[int, int], pieces: int, step: int, of_block: int) -> None:
    """`of_block`: bytes of a block of so many outputs and inputs."""
    (outputs, inputs), width, sources = shape, blocks.steps * step, blocks.splits * blocks.groups
    assert outputs % blocks.outputs == 0
    assert blocks.outputs % (64 * pieces) == 0
    count = -(-inputs // (width * sources))
    assert count * width * sources <= 1.15 * inputs
    assert 1 <= blocks.ahead <= count
    assert sources <= 8
    tokens = max(rows, 8)
    sums = blocks.groups * max(sources, 4) * blocks.outputs * tokens if sources > 1 else 0
    assert few_row_blocks.bytes_of_sums(tokens, blocks.outputs, blocks.splits, blocks.groups) == sums
    factors = blocks.groups * 16 * tokens
    assert blocks.groups * blocks.ahead * (of_block + 8) + sums + factors <= IN_PROGRAM


@given(
    rows=st.integers(1, 70),
    tiles=st.integers(1, 500),
    steps=st.integers(1, 120),
    group=st.sampled_from([16, 32, 64, 128, 256, 512, 1024]),
    pieces=st.sampled_from([1, 2]),
)
def test_blocks_of_four_bits(rows: int, tiles: int, steps: int, group: int, pieces: int) -> None:
    """They fit, and have all inputs and few more."""
    run = min(max(group // PLACES, 16), 64)
    step = PLACES * run
    outputs, inputs = 64 * tiles, steps * max(step, group)
    blocks = few_row_blocks.of_four_bits(rows, outputs, inputs, group, run, pieces)
    if blocks is None:
        assert rows > 64 or (rows > 8 and rows % 8) or (rows > 16 and group % step) or tiles % pieces
        return
    width = blocks.steps * step
    assert width % group == 0 or group % width == 0
    of_block = width * (blocks.outputs // 2 + 2 * max(rows, 8)) + max(1, width // group) * blocks.outputs * 4
    assert_sound(blocks, rows, (outputs, inputs), pieces, step, of_block)


@given(rows=st.integers(1, 20), tiles=st.integers(1, 500), inputs=st.integers(1, 1200), pieces=st.sampled_from([1, 2]))
def test_blocks_of_eight_bits(rows: int, tiles: int, inputs: int, pieces: int) -> None:
    outputs, inputs = 64 * tiles, 16 * inputs
    blocks = few_row_blocks.of_eight_bits(rows, outputs, inputs, pieces)
    if blocks is None:
        assert rows > 16 or (rows > 8 and rows % 8) or inputs % 128 or tiles % pieces
        return
    of_block = blocks.steps * 128 * (blocks.outputs + 2 * max(rows, 8))
    assert_sound(blocks, rows, (outputs, inputs), pieces, 128, of_block)


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("shape", [(3584, 18944), (2560, 9728), (5120, 13824), (7168, 5120), (4608, 3584)], ids=str)
def test_inputs_that_two_does_not_divide_often_have_large_blocks(shape: tuple[int, int], rows: int) -> None:
    blocks = few_row_blocks.of_four_bits(rows, *shape, 128, 32)
    assert blocks is not None
    assert blocks.steps >= 2


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize("shape", OF_8B, ids=str)
def test_an_8b_has_programs_for_most_of_the_device(shape: tuple[int, int], rows: int) -> None:
    pieces = 2 if shape[0] == 28672 else 1
    found = [few_row_blocks.of_four_bits(rows, *shape, 128, 32, pieces)]
    found += [few_row_blocks.of_eight_bits(rows, *shape, pieces)] if rows <= 16 else []
    for blocks in found:
        assert shape[0] // blocks.outputs * blocks.splits >= 96


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_model_takes_the_kernel_for_the_rows_that_it_is_for(has_adapters: bool, has_bias: bool) -> None:
    """With biases, and with what adapters add, as without it. Other rows are multiplied as before."""
    base, asked = turned(coded(64, 512, 128, has_zeros=True)), []

    def product(x: FewRowsIn, weight: FourBits, dtype: Any) -> jax.Array:
        assert isinstance(x, jax.Array)
        asked.append((x.shape, dtype))
        return weight.widened_product(x).astype(dtype)

    def added(*_: Any) -> Any:
        raise AssertionError("nothing is added here")

    kernels = FewRows(lambda count, dtype, weight: count <= 4, product, added)

    bias = jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16) if has_bias else None
    for count, dtype in ((3, "bfloat16"), (5, "float32")):  # no CPU has the other kernel for bfloat16
        x, weight = rows_of(count, 512, dtype), base
        if has_adapters:
            a, b = (jnp.asarray(np.random.default_rng(n).normal(size=s), "bfloat16")
                    for n, s in enumerate(((1, 1, 4, 512), (1, 4, 64))))  # fmt: skip
            stack = AdapterStack(a, b, jnp.full(1, 4, jnp.int32), ((64, 0),))
            weight = AdaptedWeight(base, stack, jnp.ones(count, jnp.int32), add_products)
        got = scaled(project_sums("td,md->tm", x, weight, bias, ProductKernels(few_rows=kernels)))
        plain = project("td,md->tm", x.astype(jnp.float32), weight, bias)
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(jnp.float32), plain, rtol=0.02, atol=0.02 * float(jnp.abs(plain).max()))
    is_whole = not has_bias and not has_adapters
    assert asked == [((3, 512), jnp.bfloat16 if is_whole else jnp.float32)]
