"""Few rows times codes of four and eight bits by the kernel for Hopper, with what follows, against float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.weights.coded import Coded
from quire.ops.weights.four_bits import FourBits
from tests.gpu.hopper import MARKS, ON_HOPPER

pytestmark = MARKS
if ON_HOPPER.mosaic:
    from quire.ops.gpu.hopper import few_rows
    from quire.ops.gpu.hopper.few_row_blocks import RowBlocks
    from quire.ops.gpu.hopper.row_epilogues import Add, Gate, Sum

OF_8B = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
SMALL = [(128, 1024), (256, 1536), (384, 1920), (3584, 18944)]  # of the last two, blocks end beyond the inputs
FORMS = ["sums", "gated", "added"]
EPS, OFFSET = 1e-5, 0.5
Weight = FourBits | Coded


def rows_of(count: int, inputs: int, dtype: str) -> jax.Array:
    """With sizes that differ from row to row."""
    chance = np.random.default_rng(count)
    return jnp.asarray(chance.normal(size=(count, inputs)) * np.exp(chance.uniform(-2, 2, (count, 1))), dtype)


def four_bits(outputs: int, inputs: int, group: int = 128, scale: str = "bfloat16", *, has_zeros: bool = True) -> Any:
    chance = np.random.default_rng(inputs)
    scales = (outputs, inputs // group)
    weight = Coded(
        codes=jnp.asarray(chance.integers(0, 256, (outputs, inputs // 2)), jnp.uint8),
        scales=jnp.asarray(np.exp(chance.uniform(-4, 0, scales)) / 4 / inputs**0.5, scale),
        zeros=jnp.asarray(chance.integers(0, 17, scales), jnp.int8) if has_zeros else None,
        index=None, input_scale=None, input_zero=None, shape=(outputs, inputs), num_contracted=1,
        is_of_experts=False, bits=4, group=group,
    )  # fmt: skip
    return FourBits.of(weight)


def eight_bits(outputs: int, inputs: int, code: str, scale: str = "float32") -> Coded:
    """Every code but NaN, and scales of many sizes."""
    chance = np.random.default_rng(outputs)
    bits = chance.integers(0, 256, (outputs, inputs)).astype(np.uint8)
    if code == "float8_e4m3fn":
        bits[bits & 0x7F == 0x7F] = 0
    codes = jnp.asarray(bits.view(np.int8)).view(code)
    scales = np.exp(chance.uniform(-4, 0, (outputs, 1))) / 80 / inputs**0.5
    return Coded(
        codes=codes, scales=jnp.asarray(scales, scale), zeros=None, index=None,
        input_scale=None, input_zero=None, shape=(outputs, inputs), num_contracted=1, is_of_experts=False, bits=8,
        group=inputs,
    )  # fmt: skip


def weight_of(code: str, shape: tuple[int, int]) -> Weight:
    found: Weight = four_bits(*shape) if code == "int4" else eight_bits(*shape, code)
    return found


def squares_of(rows: int, inputs: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(rows).uniform(1, 40, (inputs // 16, rows)), jnp.float32)


def plain(x: jax.Array, weight: Weight, squares: jax.Array | None) -> jax.Array:
    wide = weight.rows(jnp.arange(weight.shape[0]))
    out = jnp.einsum("ti,oi->to", x.astype(jnp.float32), wide, precision=jax.lax.Precision.HIGHEST)
    return out if squares is None else out * jax.lax.rsqrt(squares.sum(0) / x.shape[1] + EPS)[:, None]


def assert_near(got: jax.Array, right: jax.Array, dtype: Any) -> None:
    """Row by row, which differ in size."""
    assert got.dtype == dtype
    got, right = np.asarray(got, np.float64), np.asarray(right, np.float64)
    off = np.linalg.norm(got - right, axis=1) / np.linalg.norm(right, axis=1)
    assert (off <= (1e-5 if dtype == jnp.float32 else 2.0 ** -(jnp.finfo(dtype).nmant + 1))).all()


def made(form: str, x: jax.Array, weight: Weight, squares: jax.Array | None, blocks: Any = None) -> list[jax.Array]:
    """What a form gives, by row; `added` has a residual and a weight besides."""
    factor = None if squares is None else few_rows.RowFactor(squares, EPS)
    outputs = weight.shape[0]
    if form != "added":
        epilogue = Gate(x.dtype) if form == "gated" else Sum(jnp.dtype("float32"))
        return [few_rows.product(x, weight, epilogue, factor, blocks=blocks)[0]]
    residual, norm = residual_of(len(x), outputs, x.dtype)
    total, normal, parts = few_rows.product(
        x, weight, Add(x.dtype, norm.dtype, OFFSET), factor, residual, norm, blocks=blocks
    )
    return [total, normal, parts.T]


def residual_of(rows: int, outputs: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    chance = np.random.default_rng(1)
    return jnp.asarray(chance.normal(size=(64, outputs))[:rows], dtype), jnp.asarray(chance.normal(size=outputs), dtype)


def assert_right(form: str, x: jax.Array, weight: Weight, squares: jax.Array | None, blocks: Any = None) -> None:
    results, sums = made(form, x, weight, squares, blocks), plain(x, weight, squares)
    if form == "sums":
        assert_near(results[0], sums, jnp.float32)
        return
    if form == "gated":
        gates, ups = jnp.split(sums, 2, axis=1)
        assert_near(results[0], jax.nn.silu(gates) * ups, x.dtype)
        return
    total, normal, parts = results
    residual, norm = residual_of(len(x), weight.shape[0], x.dtype)
    assert_near(total, residual.astype(jnp.float32) + sums, x.dtype)
    wide = np.asarray(total.astype(jnp.float32))
    of_norm = jnp.asarray(wide * (np.asarray(norm.astype(jnp.float32)) + np.float32(OFFSET)))
    np.testing.assert_array_equal(normal, of_norm.astype(x.dtype))
    np.testing.assert_allclose(parts, (wide * wide).reshape(len(x), -1, 16).sum(2), rtol=1e-5)


@pytest.mark.parametrize("code", ["int4", "float8_e4m3fn"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [*SMALL, *OF_8B], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 64])
def test_products_and_what_follows(rows: int, shape: tuple[int, int], form: str, code: str) -> None:
    if rows > 16 and code != "int4":
        pytest.skip("eight bits are for up to 16 rows")
    squares = squares_of(rows, shape[1]) if rows % 3 else None
    assert_right(form, rows_of(rows, shape[1], "bfloat16"), weight_of(code, shape), squares)


@pytest.mark.parametrize("group", [32, 64, 512])
@pytest.mark.parametrize("rows", [3, 8, 32])
def test_groups_of_four_bits_and_float16(rows: int, group: int) -> None:
    weight = four_bits(256, 1536, group, "float16", has_zeros=False)
    if not few_rows.fits(rows, jnp.float16, weight):
        assert (rows, group) == (32, 32)  # more rows have a kernel for whole groups
        return
    assert_right("sums", rows_of(rows, 1536, "float16"), weight, squares_of(rows, 1536))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("code", "dtype"), [("int8", "bfloat16"), ("float8_e4m3fn", "float16"), ("int8", "float16")])
def test_other_codes_and_rows_of_eight_bits(code: str, dtype: str, form: str) -> None:
    weight = eight_bits(256, 1536, code, dtype)
    assert_right(form, rows_of(5, 1536, dtype), weight, squares_of(5, 1536))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("code", ["int4", "float8_e4m3fn"])
@pytest.mark.parametrize(("splits", "groups"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("outputs", [64, 128])
def test_programs_that_share_inputs(outputs: int, splits: int, groups: int, code: str, form: str) -> None:
    if form == "gated" and outputs == 64:
        pytest.skip("a program has 64 gates and 64 ups")
    blocks = RowBlocks(outputs, 1, 2048 // 128 // splits // groups if splits * groups > 4 else 3, splits, groups)
    assert_right(form, rows_of(8, 2048, "bfloat16"), weight_of(code, (256, 2048)), squares_of(8, 2048), blocks)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("code", ["int4", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [3, 8, 16])
def test_rows_do_not_touch_each_other(rows: int, code: str, form: str) -> None:
    """Rows without numbers, in themselves or in their squares, give none; others have the same bits."""
    weight, x, squares = weight_of(code, (8192, 4096)), rows_of(rows, 4096, "bfloat16"), squares_of(rows, 4096)
    alone = made(form, x, weight, squares)
    beside = made(form, x.at[1].set(jnp.nan), weight, squares.at[0, 2].set(jnp.nan))
    others = [row for row in range(rows) if row not in (1, 2)]
    for one, other in zip(alone, beside, strict=True):
        assert np.isnan(np.asarray(other, np.float32)[1:3]).all()
        np.testing.assert_array_equal(np.asarray(other, np.float32)[others], np.asarray(one, np.float32)[others])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("code", ["int4", "float8_e4m3fn"])
def test_a_row_has_the_same_bits_among_up_to_eight(code: str, form: str) -> None:
    weight, x, squares = weight_of(code, (8192, 4096)), rows_of(8, 4096, "bfloat16"), squares_of(8, 4096)
    together = made(form, x, weight, squares)
    for count in (1, 2, 5):
        for one, whole in zip(made(form, x[:count], weight, squares[:, :count]), together, strict=True):
            np.testing.assert_array_equal(one, whole[:count])


@pytest.mark.parametrize("shape", OF_8B, ids=str)
def test_sums_are_rounded_once(shape: tuple[int, int]) -> None:
    x, weight = rows_of(8, shape[1], "bfloat16"), four_bits(*shape)
    wide, rounded = (few_rows.sums(x, weight, jnp.dtype(dtype)) for dtype in ("float32", "bfloat16"))
    np.testing.assert_array_equal(rounded, wide.astype(jnp.bfloat16))
