"""Eight-bit weights: how near they are to what they stand for, the kernel against XLA, and rows that stay apart."""

import ctypes
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.native import int8_product, library
from quire.ops.native.building import build
from quire.ops.weights.coded import Coded
from quire.ops.weights.floats import NativeWeight
from quire.ops.weights.int8 import Grouped, Packed, group, pack
from quire.ops.weights.rounded_rows import gated_values
from quire.ops.weights.weight import Weight, for_rows

Array = np.ndarray[Any, Any]
SHAPES = (  # and how many of their axes are contracted
    ((64, 96), 1),
    ((5, 40), 1),  # neither a whole tile nor a whole group
    ((2, 12, 64), 1),
    ((20, 2, 3, 16), 3),  # runs that are shorter than a group
    ((9, 3, 80), 2),
)
native = pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")
compiled = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def forms(weight: Array, num_contracted: int) -> list[Weight]:
    return [group(weight, num_contracted), *([pack(weight, num_contracted)] if library.load() else [])]


@pytest.mark.parametrize(("shape", "num_contracted"), SHAPES)
def test_products_are_near_those_in_float32_and_the_same_in_every_form(
    shape: tuple[int, ...], num_contracted: int
) -> None:
    num_output_axes = len(shape) - num_contracted
    weight, x = normal(*shape), normal(7, *shape[num_output_axes:], seed=1)
    exact = x.reshape(7, -1) @ weight.reshape(int(np.prod(shape[:num_output_axes])), -1).T
    results = [np.asarray(form.product(jnp.asarray(x))) for form in forms(weight, num_contracted)]
    size = np.sqrt((exact**2).mean())
    assert np.abs(results[0] - exact).max() < 0.05 * size
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=1e-4 * size)


@pytest.mark.parametrize(("shape", "num_contracted"), SHAPES[:2])
def test_rows_are_looked_up_in_every_form(shape: tuple[int, ...], num_contracted: int) -> None:
    weight = normal(*shape)
    indices = jnp.asarray([3, 0, shape[0] - 1, 3])
    step = np.abs(weight).max() / 127
    for form in forms(weight, num_contracted):
        assert np.abs(np.asarray(form.rows(indices)) - weight[np.asarray(indices)]).max() <= 0.51 * step


def test_what_was_rounded_to_eight_bits_before_stays_as_it_is() -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (6, 3, 32))
    codes[:, :, 5] = 127  # as every group of a Q8_0 file has one of the largest
    scales = np.abs(normal(6, 3, 1)).astype(np.float16).astype(np.float32)
    weight = (codes * scales).astype(np.float32).reshape(6, 96)
    np.testing.assert_array_equal(np.asarray(group(weight).widened()), weight)


@native
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), others=st.integers(0, 70), seed=st.integers(0, 99))
def test_a_row_does_not_depend_on_the_rows_beside_it(rows: int, others: int, seed: int) -> None:
    weight = pack(normal(24, 96), 1)
    x = normal(rows + others, 96, seed=seed)
    alone, together = (np.asarray(weight.product(jnp.asarray(part))) for part in (x[:rows], x))
    np.testing.assert_array_equal(alone, together[:rows])


@native
@pytest.mark.parametrize("size", [96, 40])
def test_what_passes_a_gate_is_multiplied_as_if_it_had_been_computed_before(size: int) -> None:
    both, weight = jnp.asarray(3 * normal(6, 2, size)), pack(normal(16, size, seed=1), 1)
    apart = weight.product(gated_values(jax.nn.silu, both[:, None]))
    np.testing.assert_allclose(
        weight.product_of_gated(jax.nn.silu, both[:, None]), apart, atol=0.02 * float(jnp.std(apart))
    )


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_a_number_shows_in_its_own_row_alone(wrong: float) -> None:
    x = normal(5, 96)
    x[2, 40] = wrong
    for form in forms(normal(16, 96, seed=1), 1):
        finite = np.isfinite(np.asarray(form.product(jnp.asarray(x))))
        assert not finite[2].any()
        assert finite[[0, 1, 3, 4]].all()


@native
def test_zeros_give_zeros() -> None:
    x, weight = jnp.zeros((3, 64)), normal(8, 64)
    assert not np.asarray(pack(weight, 1).product(x)).any()
    assert not np.asarray(pack(np.zeros_like(weight), 1).product(jnp.ones((3, 64)))).any()


@native
@pytest.mark.parametrize("gate", [-1e30, -1000.0, -100.0, -89.0, -88.0, -87.0, -20.0, 0.0, 20.0, 88.0, 100.0, 1e30])
def test_the_gate_is_silu_for_every_number(gate: float) -> None:
    both = jnp.stack([jnp.full((1, 32), gate), jnp.ones((1, 32))], axis=1)
    weight = pack(np.eye(8, 32, dtype=np.float32), 1)
    expected = np.broadcast_to(np.asarray(jax.nn.silu(jnp.float32(gate))), (1, 8))
    np.testing.assert_allclose(weight.product_of_gated(jax.nn.silu, both[:, None]), expected, rtol=0.01, atol=1e-7)


@pytest.mark.parametrize("largest", [1e-44, 1e-38, 3.6e-37, 3.8e-37, 1e-36, 2e-36, 1e-30])
def test_the_smallest_numbers_are_quantised_to_themselves_or_to_zero(largest: float) -> None:
    tiny = (np.clip(normal(4, 96), -1, 1) * largest).astype(np.float32)
    tiny[:, ::32] = largest
    for form in forms(tiny, 1):
        rows = np.asarray(form.rows(jnp.arange(4)))
        assert np.isfinite(rows).all()
        assert np.abs(rows - tiny).max() <= max(largest / 100, 2.0**-119)
    for form in forms(normal(8, 96, seed=1), 1):
        assert np.isfinite(np.asarray(form.product(jnp.asarray(tiny)))).all()


@compiled
def test_the_plain_kernel_computes_what_the_fast_one_does(tmp_path: Path) -> None:
    """It runs where there are no instructions for int8; here it has to be built on purpose."""
    compiler = shutil.which("g++")
    assert compiler is not None
    build(compiler, tmp_path, tmp_path / "plain.so", ("-march=native", "-DQUIRE_SCALAR", "-O1"))
    plain = ctypes.cdll.LoadLibrary(str(tmp_path / "plain.so"))
    assert not plain.quire_int8_is_fast()
    handler = jax.ffi.pycapsule(plain.quire_int8_product)
    jax.ffi.register_ffi_target("plain_int8_product", handler, platform="cpu")
    weight, x = pack(normal(24, 96), 1), jnp.asarray(normal(7, 1, 96, seed=1))
    call = jax.ffi.ffi_call("plain_int8_product", jax.ShapeDtypeStruct((7, 24), jnp.float32))
    found = call(x, weight.tiles, np.int32(7))
    np.testing.assert_allclose(found, int8_product.product(x, weight.tiles, 24), rtol=1e-5, atol=1e-5)


@native
@pytest.mark.parametrize("num_rows", [0, 1, 5, 36, 37, 99])
@pytest.mark.parametrize("form", ["packed", "gated", "floats", "codes"])
def test_rows_that_do_not_count_are_zeros_and_change_no_other(form: str, num_rows: int) -> None:
    rows, weight = 37, normal(20, 96)
    x = jnp.asarray(normal(rows, 2, 96, seed=1)).at[num_rows:].set(jnp.nan)
    stored: Any = NativeWeight(jnp.asarray(weight)) if form == "floats" else pack(weight, 1)
    if form == "codes":
        codes = jnp.asarray(np.round(20 * weight), jnp.int8)
        scales = jnp.full((20, 3), 0.5)
        stored = Coded(codes, scales, None, None, None, None, (20, 96), 1, False, 8, 32, is_native=True)
    counted = for_rows({"a": [stored]}, jnp.int32(num_rows))["a"][0]

    def compute(weight: Any) -> Array:
        return np.asarray(
            weight.product_of_gated(jax.nn.silu, x[:, None]) if form == "gated" else weight.product(x[:, 0])
        )

    count = min(num_rows, rows)
    np.testing.assert_array_equal(compute(counted)[:count], compute(stored)[:count])
    assert np.isfinite(compute(counted)[:count]).all()
    np.testing.assert_array_equal(compute(counted)[count:], 0.0)


def test_the_forms_are_trees_of_arrays() -> None:
    """As programs take them; what is not an array is part of the structure."""
    for form in (Grouped(np.zeros((2, 32), np.int8), np.zeros((2, 1))), Packed(np.zeros(3, np.int8), (2, 32), 1)):
        leaves, structure = jax.tree.flatten(form)
        assert all(isinstance(leaf, np.ndarray) for leaf in leaves)
        assert jax.tree.structure(jax.tree.unflatten(structure, leaves)) == structure
