"""Experts of eight bits: one product for all, near float32, the kernel against XLA, and rows that stay apart."""

import ctypes
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gates import SILU
from quire.ops.native import int8_product, library
from quire.ops.native.building import build
from quire.ops.weights.int8 import Packed, group, pack, pack_experts, rounded
from quire.ops.weights.rounded_rows import gated_values
from quire.ops.weights.weight import ragged_product

Array = np.ndarray[Any, Any]
SHAPES = ((3, 64, 96), (4, 20, 40), (5, 1, 2, 12, 64))  # the second has neither whole tiles nor whole groups
native = pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")
compiled = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def sizes_of(num_experts: int, rows: int, seed: int = 0) -> Array:
    """Rows of each expert, some of which have none."""
    experts = np.random.default_rng(seed).integers(0, num_experts, rows)
    return np.bincount(experts, minlength=num_experts)


def one_by_one(x: Array, weight: Array, sizes: Array) -> Array:
    """The product of the rows of each expert with the numbers given."""
    ends = np.cumsum(sizes)
    matrices = weight.reshape(len(weight), -1, x.shape[1])
    return np.concatenate([x[end - size : end] @ one.T for end, size, one in zip(ends, sizes, matrices, strict=True)])


@native
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_computes_what_the_plain_product_of_rounded_numbers_is(shape: tuple[int, ...]) -> None:
    weight, x, sizes = normal(*shape), normal(23, shape[-1], seed=1), sizes_of(shape[0], 23)
    expected = one_by_one(np.asarray(rounded(jnp.asarray(x))), np.asarray(group(weight).widened()), sizes)
    size = np.sqrt((expected**2).mean())
    given = jnp.asarray(x), jnp.asarray(sizes)
    packed, plain = pack_experts(weight), group(weight)
    for found in (packed.grouped_product(*given), plain.grouped_product(*given, ragged_product, 2 * 96 * 64)):
        np.testing.assert_allclose(found, expected, atol=1e-5 * size, rtol=1e-5)
    assert 0 < np.abs(expected - one_by_one(x, weight, sizes)).max() < 0.06 * size


@native
@pytest.mark.parametrize("rows", [1, 2, 6, 13, 90, 300])
def test_a_row_has_the_bits_of_the_product_with_its_expert_alone(rows: int) -> None:
    weight, x, sizes = normal(4, 20, 96), normal(rows, 96, seed=rows), sizes_of(4, rows, seed=rows)
    packed = pack_experts(weight)
    together = np.asarray(packed.grouped_product(jnp.asarray(x), jnp.asarray(sizes)))
    multiply = jax.jit(lambda x, tiles: int8_product.product(x, tiles, 20))
    for row, expert in enumerate(np.repeat(np.arange(4), sizes)):
        np.testing.assert_array_equal(multiply(x[row][None, None], packed.tiles[expert])[0], together[row])


@native
@pytest.mark.parametrize("size", [96, 40])
def test_what_passes_a_gate_is_multiplied_as_if_it_had_been_computed_before(size: int) -> None:
    sizes = jnp.asarray(sizes_of(3, 17))
    both, weight = jnp.asarray(3 * normal(17, 2, size)), pack_experts(normal(3, 16, size, seed=1))
    apart = weight.grouped_product(gated_values(jax.nn.silu, both[:, None]), sizes)
    found = weight.grouped_product_of_gated(SILU, both[:, None], sizes)
    np.testing.assert_allclose(found, apart, atol=0.02 * float(jnp.std(apart)))
    alone = Packed(weight.tiles[0], (16, size), 1)
    rows = int(sizes[0])
    np.testing.assert_array_equal(
        found[:rows], int8_product.product(both[:rows], jnp.asarray(alone.tiles), 16, gated=True)
    )


@native
def test_rows_that_no_expert_has_are_zero_and_an_expert_may_have_all() -> None:
    x, weight = jnp.asarray(normal(6, 64)), pack_experts(normal(3, 16, 64))
    some = np.asarray(weight.grouped_product(x, jnp.asarray([0, 4, 0])))
    assert some[:4].all()
    assert not some[4:].any()
    every = weight.grouped_product(x, jnp.asarray([0, 0, 6]))
    np.testing.assert_array_equal(every, Packed(weight.tiles[2], (16, 64), 1).product(x))
    assert not np.asarray(weight.grouped_product(x, jnp.asarray([0, 0, 0]))).any()


@native
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_a_number_shows_in_its_own_row_alone(wrong: float) -> None:
    x = normal(5, 96)
    x[2, 40] = wrong
    found = pack_experts(normal(2, 16, 96)).grouped_product(jnp.asarray(x), jnp.asarray([3, 2]))
    finite = np.isfinite(np.asarray(found))
    assert not finite[2].any()
    assert finite[[0, 1, 3, 4]].all()


@native
def test_experts_are_packed_as_matrices_are() -> None:
    weight = normal(3, 20, 64)
    packed = pack_experts(weight)
    for expert, tiles in enumerate(packed.tiles):
        np.testing.assert_array_equal(tiles, pack(weight[expert], 1).tiles)


@compiled
def test_the_plain_kernel_computes_what_the_fast_one_does(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None
    plain = tmp_path / "plain.so"
    build(compiler, tmp_path, plain, ("-march=native", "-DQUIRE_SCALAR", "-O1"), sources=("int8_product.cc",))
    handler = jax.ffi.pycapsule(ctypes.cdll.LoadLibrary(str(plain)).quire_int8_grouped_product)
    jax.ffi.register_ffi_target("plain_int8_grouped_product", handler, platform="cpu")
    weight, x, sizes = pack_experts(normal(3, 24, 96)), jnp.asarray(normal(19, 96, seed=1)), sizes_of(3, 19)
    call = jax.ffi.ffi_call("plain_int8_grouped_product", jax.ShapeDtypeStruct((19, 24), jnp.float32))
    found = call(x[:, None], weight.tiles, sizes.astype(np.int32), gated=False)
    fast = weight.grouped_product(x, jnp.asarray(sizes))
    np.testing.assert_allclose(found, fast, rtol=1e-5, atol=1e-5)
