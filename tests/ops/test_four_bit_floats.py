"""Products with codes of four-bit floats, and rows that are rounded to them, against numpy."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quire.ops.gpu.expert_weights import layout_of
from quire.ops.kernels import gpu_form
from quire.ops.weights.activation_rounding import Rounding, nearest_four_bit_floats
from quire.ops.weights.coded import FEW_ROWS, Coded
from quire.ops.weights.weight import ragged_product
from tests.models.four_bit_matrices import OVER, SIZES, by_local, by_power, four_bit_codes, values_of
from tests.ops.test_coded import MOST_ROWS, needs_library, numbers

Array = np.ndarray[Any, Any]
LOCAL, POWERS = Rounding(is_float=True, group=16, bits=4), Rounding(is_float=True, group=32, bits=4)


def coded(shape: tuple[int, ...], group: int, rounding: Rounding | None = None, **others: Any) -> Coded:
    rng = np.random.default_rng(len(shape))
    *outer, inputs = shape
    codes = rng.integers(0, 256, (*outer, inputs // 2), np.uint8)
    scales: Array = rng.uniform(0.01, 300, (*outer, inputs // group)).astype(ml_dtypes.float8_e4m3fn)
    if group == 32:
        scales = rng.integers(100, 130, scales.shape, np.uint8)
    over = jnp.float32(OVER) if rounding == LOCAL else None
    return Coded(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(scales),
        zeros=None,
        index=None,
        input_scale=over if over is None or len(shape) == 2 else jnp.full(shape[0], over),
        input_zero=None,
        shape=shape,
        num_contracted=1,
        is_of_experts=len(shape) > 2,
        bits=4,
        group=group,
        rounding=rounding,
        output_scales=jnp.asarray(rng.uniform(1e-4, 1e-3, outer).astype(np.float32)) if group == 16 else None,
        **others,
    )


def wide(weight: Coded) -> Array:
    codes, scales = np.asarray(weight.codes), np.asarray(weight.scales)
    powers = np.ldexp(np.float64(1), scales.astype(int) - 127) if weight.group == 32 else scales.astype(np.float64)
    found = values_of(np.stack((codes & 15, codes >> 4), -1).reshape(weight.shape)) * np.repeat(
        powers, weight.group, -1
    )
    return found if weight.output_scales is None else found * np.asarray(weight.output_scales, np.float64)[..., None]


def test_numbers_become_the_nearest_code_and_the_even_one_of_two() -> None:
    between = np.concatenate((SIZES, (SIZES[1:] + SIZES[:-1]) / 2, np.linspace(0, 9, 1000, dtype=np.float32)))
    x = np.concatenate((between, np.nextafter(between, np.float32(10)), np.nextafter(between, np.float32(-10))))
    both = np.concatenate((x, -x))
    expected = values_of(four_bit_codes(np.clip(both, -6, 6)))
    np.testing.assert_array_equal(nearest_four_bit_floats(jnp.asarray(both)), expected)
    assert np.isnan(nearest_four_bit_floats(jnp.asarray([np.nan]))).all()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 40.0])
@pytest.mark.parametrize(
    ("rounding", "over", "reference"), [(LOCAL, OVER, by_local(OVER)), (POWERS, None, by_power)], ids=["nvfp4", "mxfp4"]
)
def test_rows_are_rounded_bit_by_bit_as_defined(rounding: Rounding, over: Any, reference: Any, scale: float) -> None:
    @jax.jit
    def rounded(x: jax.Array) -> jax.Array:
        codes, scales = rounding(x, None if over is None else jnp.float32(over), None)
        return codes * jnp.repeat(scales, rounding.group or 0, axis=1)

    x = np.float32(scale) * numbers(1, 300, 64)
    x[7, :32], x[8, 5], x[9, :32] = 0, 0, 6.5 * np.float32(scale)
    np.testing.assert_array_equal(rounded(x), reference(x))


def test_a_row_with_a_number_that_is_none_gives_none() -> None:
    weight = coded((33, 64), 32, POWERS)
    x = numbers(4, 3, 64)
    x[1, 40] = np.nan
    assert np.isnan(np.asarray(weight.product(x))).all(axis=1).tolist() == [False, True, False]


@needs_library
@pytest.mark.parametrize("group", [16, 32])
def test_the_kernel_widens_every_code_exactly(group: int) -> None:
    """Unit vectors pick the numbers one by one; every scale occurs."""
    bytes_ = np.arange(256, dtype=np.uint8)
    is_number = np.isfinite(bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    every = bytes_[is_number] if group == 16 else bytes_[2:252]  # those of floats that are neither tiny nor infinite
    inputs = group * len(every)
    rng = np.random.default_rng(0)
    codes = rng.permuted(np.broadcast_to(np.resize(bytes_, inputs // 2), (3, inputs // 2)), axis=1)
    scales = rng.permuted(np.broadcast_to(every, (3, len(every))), axis=1)
    scales = scales.view(ml_dtypes.float8_e4m3fn) if group == 16 else scales
    weight = replace(coded((3, inputs), group), codes=jnp.asarray(codes), scales=jnp.asarray(scales), is_native=True)
    weight = replace(weight, output_scales=None)
    picked = np.asarray(jax.jit(weight.product)(jnp.eye(inputs))).T
    np.testing.assert_array_equal(picked, wide(weight).astype(np.float32))


@needs_library
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("rounding", [None, LOCAL, POWERS, Rounding(is_float=True)])
def test_a_row_does_not_depend_on_its_neighbours(group: int, rounding: Rounding | None) -> None:
    weight = coded((33, 64), group, rounding, is_native=True)
    product = jax.jit(weight.product)
    x = numbers(2, MOST_ROWS, 64)
    among = np.asarray(product(x))
    for first, count in ((3, 1), (5, 17)):
        np.testing.assert_array_equal(product(x[first : first + count]), among[first : first + count])
    plain = jax.jit(replace(weight, is_native=False).product)(x)
    np.testing.assert_allclose(among, plain, rtol=1e-4, atol=1e-4)
    if rounding is None:
        np.testing.assert_allclose(among, x @ wide(weight).T, rtol=1e-4, atol=1e-4)


def test_a_widened_weight_is_exact_in_bfloat16() -> None:
    """The scale of each output multiplies sums, so that no number of the weight is rounded."""
    weight = coded((33, 64), 16)
    one = jnp.eye(64, dtype=jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(weight.product(one)).T, wide(weight), rtol=2e-7)


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_library)])
@pytest.mark.parametrize(("group", "rounding"), [(16, None), (16, LOCAL), (32, None), (32, POWERS)])
def test_experts_multiply_their_own_rows(group: int, rounding: Rounding | None, is_native: bool) -> None:
    weight = replace(coded((4, 1, 2, 10, 32), group, rounding), is_native=is_native)
    x, sizes = numbers(3, 12, 32), [3, 0, 5, 2]  # the last rows belong to none
    out = np.asarray(jax.jit(lambda x: weight.grouped_product(x, jnp.asarray(sizes), ragged_product, 700))(x))
    rounds = {None: lambda x: x, LOCAL: by_local(OVER), POWERS: by_power}[rounding]
    start = 0
    for size, matrix in zip(sizes, wide(weight).reshape(4, 20, 32), strict=True):
        rows = rounds(x[start : start + size])
        np.testing.assert_allclose(out[start : start + size], rows @ matrix.T, rtol=1e-4, atol=1e-4)
        start += size
    assert not out[start:].any()


def test_rows_of_a_matrix_are_scaled_too() -> None:
    weight = coded((33, 64), 16)
    np.testing.assert_allclose(weight.rows(jnp.asarray([3, 30])), wide(weight)[[3, 30]], rtol=2e-7)


@pytest.mark.parametrize("group", [16, 32])
def test_kernels_for_integers_of_four_bits_do_not_take_them(group: int) -> None:
    for weight in (coded((64, 512), group), coded((64, 512), group, LOCAL)):
        assert isinstance(gpu_form(weight, is_alone=True), Coded)
    experts = coded((4, 64, 512), 16)
    assert isinstance(gpu_form(experts, is_alone=True), Coded)
    assert layout_of(jnp.zeros((1, 512), jnp.bfloat16), experts) is None


def test_a_gpu_rounds_few_rows_of_experts_as_well() -> None:
    weight = replace(coded((4, 64, 512), 32, POWERS), is_direct=True)
    x = numbers(5, FEW_ROWS, 512)
    got = weight.rounded_visits(jnp.asarray(x)[:, None], jnp.zeros((FEW_ROWS, 1), jnp.int32))
    np.testing.assert_array_equal(np.asarray(got)[:, 0], by_power(x))
