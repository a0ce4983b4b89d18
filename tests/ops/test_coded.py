"""Products with the codes of quantised checkpoints, against numpy."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.native import library
from quire.ops.weights.activation_rounding import Rounding
from quire.ops.weights.coded import FEW_ROWS, Coded
from quire.ops.weights.floats import PlainWeight
from quire.ops.weights.weight import ragged_product
from tests.models.quantized_matrices import by_bounded_token, by_run, by_stored, by_token

Array = np.ndarray[Any, Any]
MOST_ROWS = 40
needs_library = pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")
ROUNDINGS = {
    "none": None,
    "float8": Rounding(is_float=True),
    "float8 runs": Rounding(is_float=True, group=16),
    "float8 bounded": Rounding(is_float=True, reach=1.5),
    "int8": Rounding(is_float=False),
    "int8 asymmetric": Rounding(is_float=False, symmetric=False),
}


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def coded(shape: tuple[int, ...], bits: int, rounding: Rounding | None, seed: int = 0, **others: Any) -> Coded:
    rng = np.random.default_rng(seed)
    *outer, inputs = shape
    groups = inputs // 16
    if bits == 4:
        codes: Array = rng.integers(0, 256, (*outer, inputs // 2), np.uint8)
    else:
        codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    return Coded(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(rng.uniform(0.01, 0.1, (*outer, groups)).astype(np.float16)),
        zeros=jnp.asarray(rng.integers(0, 16, (*outer, groups), np.int8)) if bits == 4 else None,
        index=None,
        input_scale=others.pop("input_scale", None),
        input_zero=None,
        shape=shape,
        num_contracted=1,
        is_of_experts=len(shape) > 2,
        bits=bits,
        group=16,
        rounding=rounding,
        **others,
    )


def wide(weight: Coded) -> Array:
    codes = np.asarray(weight.codes)
    if weight.bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1)
    zeros = 0.0 if weight.zeros is None else np.repeat(np.asarray(weight.zeros), 16, -1)
    return (codes.astype(np.float32) - zeros) * np.repeat(np.asarray(weight.scales, np.float32), 16, -1)


@pytest.mark.parametrize("shape", [(7, 48), (300, 64)])
@pytest.mark.parametrize(
    ("rounding", "reference"),
    [
        (Rounding(is_float=True), by_token(True)),
        (Rounding(is_float=True, group=16), by_run(16)),
        (Rounding(is_float=True, reach=1.5), by_bounded_token(1.5)),
        (Rounding(is_float=False), by_token(False)),
        (Rounding(is_float=False, symmetric=False), by_token(False, False)),
    ],
)
def test_rows_are_rounded_bit_by_bit_as_defined(shape: tuple[int, int], rounding: Rounding, reference: Any) -> None:
    @jax.jit
    def rounded(x: jax.Array) -> jax.Array:
        codes, scales = rounding(x, None, None)
        return codes * jnp.repeat(scales, x.shape[1] // scales.shape[1], axis=1)

    x = numbers(1, *shape)
    np.testing.assert_array_equal(rounded(x), reference(x))


def test_a_bound_has_a_least_scale() -> None:
    x = np.full((1, 16), 1e-9, np.float32)
    codes, scales = Rounding(is_float=True, reach=1.5)(x, None, None)
    np.testing.assert_array_equal(codes * scales, by_bounded_token(1.5)(x))
    assert not np.asarray(codes).any()  # a scale of their own would keep them
    assert np.asarray(by_token(True)(x)).any()


@pytest.mark.parametrize("num_rows", [FEW_ROWS, FEW_ROWS + 1])
def test_a_gpu_honours_the_bound_of_rows_whether_it_rounds_them_or_not(num_rows: int) -> None:
    rounding = Rounding(is_float=True, reach=1.5)
    weight = coded((33, 64), 8, rounding, is_direct=True)
    weight = replace(weight, scales=weight.scales[:, :1], group=64)
    x = 4 * numbers(4, num_rows, 64)
    rows = np.clip(x, -1.5, 1.5) if num_rows == FEW_ROWS else by_bounded_token(1.5)(x)
    expected = rows @ (np.asarray(weight.codes, np.float32) * np.asarray(weight.scales, np.float32)).T
    np.testing.assert_allclose(weight.product(x), expected, rtol=1e-4, atol=1e-4)
    assert weight.row_code_dtype(num_rows, None) is None  # rows that are rounded before know no bound
    assert replace(weight, rounding=Rounding(is_float=True)).row_code_dtype(64, None) is not None


def test_few_rows_of_experts_are_cut_to_the_bound_on_a_gpu() -> None:
    weight = coded((4, 33, 64), 8, Rounding(is_float=True, reach=1.5), is_direct=True)
    x = 4 * numbers(4, FEW_ROWS, 1, 64)
    got = weight.rounded_visits(jnp.asarray(x), jnp.zeros((FEW_ROWS, 1), jnp.int32))
    np.testing.assert_array_equal(got, np.clip(x, -1.5, 1.5))


def test_a_row_of_zeros_stays_zero() -> None:
    for rounding in ROUNDINGS.values():
        if rounding is not None:
            codes, scales = rounding(jnp.zeros((2, 32)), None, None)
            assert not np.asarray(codes).any()
            assert np.isfinite(np.asarray(scales)).all()


def test_numbers_beyond_a_stored_scale_are_cut() -> None:
    for is_float, most in ((True, 448), (False, 127)):
        codes, _ = Rounding(is_float)(jnp.asarray([[1e6, -1e6]]), jnp.float32(1.0), None)
        assert np.asarray(codes)[0].tolist() == [most, -most - (0 if is_float else 1)]


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_none_gives_no_number(broken: float, is_float: bool, scale: float | None) -> None:
    x = numbers(5, 3, 2048)
    x[1, 7] = broken
    rounded = jax.jit(lambda x: Rounding(is_float).codes(x, None if scale is None else jnp.float32(scale)))
    codes, scales = (np.asarray(one, np.float32) for one in rounded(x))
    is_number = np.isfinite(codes @ np.ones(2048, np.float32) * scales[:, 0])
    cut = is_float and scale is not None and np.isinf(broken)  # as any number beyond a stored scale
    assert is_number.tolist() == [True, cut, True]


@pytest.mark.parametrize(("name", "reference"), [("float8", by_token(True)), ("float8 runs", by_run(16))])
def test_products_in_bfloat16_round_the_rows_as_defined(name: str, reference: Any) -> None:
    weight = coded((33, 64), 8, ROUNDINGS[name])
    x = jnp.asarray(numbers(4, 50, 64), jnp.bfloat16)
    got = np.asarray(weight.product(x))
    rows = np.asarray(x, np.float32)
    rounded, exact = (part @ wide(weight).T for part in (reference(rows), rows))
    size = np.sqrt((rounded**2).mean())
    assert np.sqrt(((got - rounded) ** 2).mean()) < 0.006 * size  # that of rounding numbers to bfloat16
    assert np.sqrt(((exact - rounded) ** 2).mean()) > 0.015 * size


@needs_library
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_its_neighbours(bits: int, name: str) -> None:
    weight = coded((33, 64), bits, ROUNDINGS[name], is_native=True)
    product = jax.jit(weight.product)
    x = numbers(2, MOST_ROWS, 64)
    among = np.asarray(product(x))
    for first, count in ((3, 1), (5, 17)):
        np.testing.assert_array_equal(product(x[first : first + count]), among[first : first + count])
    plain = jax.jit(replace(weight, is_native=False).product)(x)
    np.testing.assert_allclose(among, plain, rtol=1e-4, atol=1e-4)


@needs_library
@pytest.mark.parametrize(("inputs", "group"), [(254, 254), (192, 16), (160, 32), (208, 128), (176, 22)])
@pytest.mark.parametrize("codes", ["int4", "e2m1", "int8", "e4m3"])
def test_few_rows_have_the_bits_that_they_have_among_many(codes: str, inputs: int, group: int) -> None:
    """Few rows meet codes in registers, many the numbers that were widened in memory."""
    rng = np.random.default_rng(0)
    groups, bits = -(-inputs // group), 4 if codes in ("int4", "e2m1") else 8
    stored: Array = rng.integers(0, 120, (7, inputs * bits // 8), np.uint8) * (2 if bits == 4 else 1)
    scales = rng.uniform(0.01, 0.1, (7, groups)).astype(ml_dtypes.float8_e4m3fn if codes == "e2m1" else np.float16)
    has_zeros = codes in ("int4", "int8")
    weight = Coded(
        jnp.asarray(stored.view({"int8": np.int8, "e4m3": ml_dtypes.float8_e4m3fn}.get(codes, np.uint8))),
        jnp.asarray(scales), jnp.asarray(rng.integers(0, 16, (7, groups), np.int8)) if has_zeros else None,
        None, None, None, (7, inputs), 1, False, bits, group, None, True,
    )  # fmt: skip
    x = numbers(1, 60, inputs)
    product = jax.jit(weight.product)
    many = np.asarray(product(x))
    plain = jax.jit(replace(weight, is_native=False).product)(x)
    np.testing.assert_allclose(many, plain, rtol=1e-4, atol=1e-4 * np.abs(many).max())
    for count in (*range(1, 10), 12, 15, 16, 17, 18):
        np.testing.assert_array_equal(product(x[count : 2 * count]), many[count : 2 * count])


@needs_library
@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("code_dtype", [np.uint8, np.int8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("has_index", [False, True])
def test_the_kernel_widens_every_code_exactly(code_dtype: Any, scale_dtype: Any, has_index: bool) -> None:
    """Unit vectors pick the numbers one by one."""
    rng = np.random.default_rng(0)
    inputs, group = 254, 22  # no multiple of a register; the last group is shorter
    every = np.delete(np.arange(256, dtype=np.uint8), [127, 255])  # of e4m3 these two are no numbers
    codes = rng.permuted(np.broadcast_to(every, (5, 254)), axis=1)
    bits = 4 if code_dtype is np.uint8 else 8
    inputs, groups = inputs * 8 // bits, -(-inputs * 8 // bits // group)
    zeros = None if bits == 8 and code_dtype is not np.int8 else rng.integers(-9, 129, (5, groups)).astype(np.int16)
    scales = rng.uniform(1e-8, 2.0, (5, groups)).astype(scale_dtype)
    index = rng.permutation(np.arange(inputs) // group).astype(np.int32) if has_index else None
    weight = Coded(
        jnp.asarray(codes.view(code_dtype)), jnp.asarray(scales), None if zeros is None else jnp.asarray(zeros),
        None if index is None else jnp.asarray(index), None, None, (5, inputs), 1, False, bits, group, None, True,
    )  # fmt: skip
    numbers = codes.view(code_dtype).astype(np.float32)
    if bits == 4:
        numbers = np.stack((codes & 15, codes >> 4), -1).reshape(5, -1).astype(np.float32)
    of = np.arange(inputs) // group if index is None else index
    expected = (numbers - (0 if zeros is None else zeros[:, of])) * scales.astype(np.float32)[:, of]
    np.testing.assert_array_equal(weight.product(jnp.eye(inputs)).T, expected)


def test_all_codes_but_e4m3_gain_from_timings() -> None:
    of_bytes, of_floats, of_four_bits = coded((8, 16), 8, None), coded((8, 16), 8, None), coded((8, 16), 4, None)
    of_bytes = replace(of_bytes, codes=of_bytes.codes.astype(jnp.int8))
    found = [one.gains_from_timings for one in (of_floats, of_bytes, of_four_bits, PlainWeight(jnp.ones((8, 16))))]
    assert found == [False, True, True, False]


@needs_library
def test_a_code_that_is_no_number_gives_none() -> None:
    codes = np.array([[0x7F, 0, 0, 0], [0, 0, 0, 0xFF], [0, 0, 0, 0]], np.uint8).view(ml_dtypes.float8_e4m3fn)
    weight = Coded(jnp.asarray(codes), jnp.ones((3, 2)), None, None, None, None, (3, 4), 1, False, 8, 2, None, True)
    assert np.isnan(np.asarray(weight.product(jnp.ones((1, 4))))).tolist() == [[True, True, False]]


SCALES = np.linspace(0.02, 0.07, 6, dtype=np.float32)
EXPERTS = coded((6, 1, 2, 10, 32), 4, Rounding(is_float=True), input_scale=jnp.asarray(SCALES))


@partial(jax.jit, static_argnums=(2, 3))
def by_experts(x: jax.Array, sizes: jax.Array, at_once: int, is_native: bool) -> jax.Array:
    return replace(EXPERTS, is_native=is_native).grouped_product(x, sizes, ragged_product, at_once)


@given(
    sizes=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    at_once=st.sampled_from([1, 2000, 10**9]),
    is_native=st.sampled_from([False, True] if library.load() else [False]),
)
@settings(max_examples=40)
def test_experts_multiply_their_own_rows_however_many_are_widened_together(
    sizes: list[int], at_once: int, is_native: bool
) -> None:
    x = numbers(3, 38, 32)  # the last rows belong to none
    out = by_experts(jnp.asarray(x), jnp.asarray(sizes), at_once, is_native)
    matrices = wide(EXPERTS).reshape(6, 20, 32)
    start = 0
    for size, matrix, scale in zip(sizes, matrices, SCALES, strict=True):
        rows = by_stored(float(scale), True)(x[start : start + size])
        np.testing.assert_allclose(out[start : start + size], rows @ matrix.T, rtol=1e-5, atol=1e-5)
        start += size
    assert not np.asarray(out[start:]).any()
