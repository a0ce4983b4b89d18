"""Rows that kernels for GPUs round where they are made, against the plain functions: on a GPU where there is one, and
interpreted elsewhere."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.heads import HeadNorm, Heads, Rotation
from quire.ops.attention.step_attention import place
from quire.ops.gpu import rounded_rows
from quire.ops.gpu.place_heads import place_heads
from quire.ops.pages import KVWriteTargets
from quire.ops.weights import rounded_rows as plain_rounding
from quire.ops.weights.rounded_rows import RoundedRows, ScaledSums, scaled
from tests.gpu.test_kernels import INTERPRET, check, each_dtype

pytestmark = pytest.mark.gpu
KERNELS = ("round_rows", "add_norm", "gate")


def check_rounded(got: RoundedRows, right: RoundedRows) -> None:
    """Bit by bit where both are compiled for a CPU. A GPU divides by scales in its own way."""
    codes, expected = (np.asarray(rows.codes, np.float32) for rows in (got, right))
    assert got.codes.dtype == right.codes.dtype
    np.testing.assert_allclose(got.scales, right.scales, rtol=0 if INTERPRET else 1e-2)
    if INTERPRET:
        np.testing.assert_array_equal(codes, expected)
    near, values = codes * np.asarray(got.scales), np.asarray(right.values, np.float32)
    assert np.linalg.norm(near - values) < 0.05 * np.linalg.norm(values)


def sums_of(chance: np.random.Generator, shape: tuple[int, ...], dtype: str, model_dtype: Any) -> ScaledSums:
    """Numbers of very different sizes in the rows."""
    sums = jnp.asarray(np.rint(chance.normal(size=shape) * 400), dtype)
    rows = jnp.asarray(np.exp(chance.uniform(-8, -2, (shape[0], 1))), jnp.float32)
    columns = jnp.asarray(np.exp(chance.uniform(-2, 0, int(np.prod(shape[1:])))), jnp.float32)
    return ScaledSums(sums, rows, columns, jnp.dtype(model_dtype))


each_code = pytest.mark.parametrize("code_dtype", ["float8_e4m3fn", "int8"])


@each_code
@each_dtype
@pytest.mark.parametrize("shape", [(3, 576), (33, 4096), (5, 14336), (2, 40000)], ids=str)
def test_rows_are_rounded_as_by_the_plain_function(shape: tuple[int, int], dtype: str, code_dtype: str) -> None:
    chance = np.random.default_rng(0)
    numbers = chance.normal(size=shape) * np.exp(chance.uniform(-6, 6, (shape[0], 1)))
    numbers[1] = 0
    x, code = jnp.asarray(numbers, dtype), jnp.dtype(code_dtype)
    got = jax.jit(partial(rounded_rows.round_rows, interpret=INTERPRET), static_argnums=1)(x, code)
    check_rounded(got, jax.jit(plain_rounding.round_rows, static_argnums=1)(x, code))


@each_code
@pytest.mark.parametrize("shape", [(3, 576), (33, 4096), (2, 40000)], ids=str)
@pytest.mark.parametrize("addend", ["none", "array", "bfloat16", "int32"])
def test_a_sum_and_its_rounded_norm_are_those_of_the_plain_function(
    shape: tuple[int, int], addend: str, code_dtype: str
) -> None:
    """Of whole numbers, whose squares have the same sum in every order."""
    chance = np.random.default_rng(0)
    x = jnp.asarray(chance.integers(-8, 9, size=shape), jnp.bfloat16)
    weight, code = jnp.asarray(chance.normal(size=shape[1]), jnp.bfloat16), jnp.dtype(code_dtype)
    out: Any = None
    if addend != "none":
        sums = jnp.asarray(chance.integers(-8, 9, size=shape), "bfloat16" if addend == "array" else addend)
        halves, doubles = jnp.full((shape[0], 1), 0.5, jnp.float32), jnp.full(shape[1], 2.0, jnp.float32)
        out = ScaledSums(sums, halves, doubles, jnp.dtype("bfloat16"))
        out = scaled(out) if addend == "array" else out

    @partial(jax.jit, static_argnums=0)
    def run(add: Any, x: jax.Array, out: Any) -> Any:
        return add(x, out, weight, 1e-5, 1.0, code)

    total, got = run(partial(rounded_rows.add_norm, interpret=INTERPRET), x, out)
    right_total, right = run(plain_rounding.add_rms_norm, x, out)
    assert np.array_equal(np.asarray(total, np.float32), np.asarray(right_total, np.float32))
    check_rounded(got, right)


@each_code
@pytest.mark.parametrize("size", [576, 14336, 40000])
@pytest.mark.parametrize("sums", ["array", "bfloat16", "int32"])
def test_gates_are_applied_and_rounded_as_by_the_plain_function(size: int, sums: str, code_dtype: str) -> None:
    chance, code = np.random.default_rng(0), jnp.dtype(code_dtype)
    both: Any = sums_of(chance, (5, 1, 2, size), "bfloat16" if sums == "array" else sums, "bfloat16")
    both = scaled(both) if sums == "array" else both

    @partial(jax.jit, static_argnums=0)
    def run(gate: Any, both: Any) -> RoundedRows:
        return gate(jax.nn.silu, both, code)  # type: ignore[no-any-return]

    check_rounded(run(partial(rounded_rows.gate, interpret=INTERPRET), both), run(plain_rounding.gate, both))


def rounded_by(ops: Any, kind: str, numbers: Any, code: Any) -> RoundedRows:
    """Rows that are rounded as they are, after a norm, or after a gate."""
    x = jnp.asarray(numbers, jnp.bfloat16)
    if kind == "rows":
        return ops.round_rows(x, code)  # type: ignore[no-any-return]
    if kind == "norm":
        norm = ops.add_norm if hasattr(ops, "add_norm") else ops.add_rms_norm
        return norm(x, None, jnp.ones(x.shape[1], x.dtype), 1e-5, 0.0, code)[1]  # type: ignore[no-any-return]
    both = jnp.stack([x, jnp.ones_like(x)], axis=1)[:, None]
    return ops.gate(jax.nn.silu, both, code)  # type: ignore[no-any-return]


@each_code
@pytest.mark.parametrize("size", [576, 5000])
@pytest.mark.parametrize("kind", ["rows", "norm", "gate"])
def test_a_row_with_a_number_that_is_none_has_such_a_scale(kind: str, size: int, code_dtype: str) -> None:
    """Codes of eight bits may be numbers there: times the scale they are not."""
    code = jnp.dtype(code_dtype)
    whole = np.random.default_rng(0).integers(-8, 9, size=(6, size)).astype(np.float32)
    broken = whole.copy()
    broken[[1, 2, 3, 4], [0, size - 1, size // 2, size - 1]] = np.nan, np.nan, np.inf, -np.inf
    interpreted = {name: partial(getattr(rounded_rows, name), interpret=INTERPRET) for name in KERNELS}
    for ops in (SimpleNamespace(**interpreted), plain_rounding):
        got, alone = (rounded_by(ops, kind, numbers, code) for numbers in (broken, whole))
        assert np.isnan(np.asarray(got.scales)[1:3]).all()
        assert not np.isfinite(np.asarray(got.codes, np.float32) * np.asarray(got.scales))[1:5].any()
        for one, other in ((got.codes, alone.codes), (got.scales, alone.scales)):
            np.testing.assert_array_equal(np.asarray(one, np.float32)[[0, 5]], np.asarray(other, np.float32)[[0, 5]])


@pytest.mark.parametrize("sums", ["bfloat16", "int32"])
@pytest.mark.parametrize("tokens", [8, 600])
def test_heads_get_the_scales_of_their_sums(sums: str, tokens: int) -> None:
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 7, (tokens, 40))
    rotation = Rotation(jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    norm = HeadNorm(jnp.asarray(rng.normal(size=80), jnp.bfloat16), 1e-6)
    heads = Heads(sums_of(rng, (tokens, 2, 4, 80), sums, "bfloat16"), rotation, None, norm)
    slots = rng.permutation(np.arange(16, 64 * 16))[:tokens]
    targets = KVWriteTargets(jnp.asarray(slots // 16), jnp.asarray(slots % 16))
    pages = tuple(jnp.asarray(rng.normal(size=(64, 16, 2, 80)), jnp.bfloat16) for _ in range(2))
    q, right = place(heads, pages, targets)
    got, written = jax.jit(partial(place_heads, interpret=INTERPRET))(heads, pages, targets)
    check(got, q, "bfloat16")
    for one, other in zip(written, right, strict=True):
        check(one[1:], other[1:], "bfloat16")
