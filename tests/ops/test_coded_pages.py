"""Keys and values of eight bits: written with a scale for each token and head, and read by every kernel alike."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quire.ops.attention.heads import HeadNorm, Heads, Rotation, joined
from quire.ops.attention.reference import whole_sequence
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import PLAIN, Kernels, step_attention
from quire.ops.gpu.decode_attention import Tiling, decode_attention
from quire.ops.gpu.place_heads import place_heads
from quire.ops.kernels import NATIVE
from quire.ops.native import library
from quire.ops.pages import (
    CodedPages,
    KVWriteTargets,
    PageAccess,
    PagedContext,
    Tiles,
    coded,
    read_pages,
    read_tokens,
    written,
)
from tests.ops.test_attention import dense
from tests.ops.test_tiled_attention import interpreted

Array = np.ndarray[Any, Any]
DTYPES = ("float8_e4m3fn", "int8")
compiled_written, compiled_whole = jax.jit(written), jax.jit(whole_sequence, static_argnums=0)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
HEADS, SIZE, PAGE_SIZE, NUM_PAGES = 2, 24, 16, 9


def empty(dtype: str) -> CodedPages:
    """Everything that is not written is no number."""
    codes = jnp.full((NUM_PAGES, PAGE_SIZE, HEADS, SIZE), 127 if dtype == "int8" else jnp.nan, dtype)
    scales = jnp.full((NUM_PAGES, HEADS, PAGE_SIZE), jnp.nan, jnp.bfloat16)
    return CodedPages(codes, codes, scales, scales)


def numbers(seed: int, count: int) -> Array:
    """Heads of very different sizes, one of them of zeros."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((count, HEADS, SIZE)) * np.exp(rng.uniform(-20, 20, (count, HEADS, 1)))
    found[0, 0] = 0.0
    return found.astype(np.float32)


def rounded(x: Array, dtype: str) -> Array:
    """What remains of heads [..., h], by numpy."""
    most = 448.0 if dtype == "float8_e4m3fn" else 127.0
    reach = np.abs(x).max(-1, keepdims=True)
    scales = np.maximum(reach / np.float32(most), np.float32(2.0**-100)).astype(ml_dtypes.bfloat16).astype(np.float32)
    codes = np.clip(x / scales, -most, most)
    codes = codes.astype(dtype).astype(np.float32) if dtype != "int8" else np.floor(codes + 0.5)
    return codes * scales


@each_dtype
def test_tokens_are_read_as_they_were_rounded_when_written(dtype: str) -> None:
    k, v = numbers(0, 20), numbers(1, 20)
    places = np.random.default_rng(2).permutation(np.arange(PAGE_SIZE, NUM_PAGES * PAGE_SIZE))[:20]
    targets = KVWriteTargets(jnp.asarray(places // PAGE_SIZE), jnp.asarray(places % PAGE_SIZE))
    pages = compiled_written(empty(dtype), k, v, targets)
    for got, right in zip(read_tokens(pages, targets, "float32"), (k, v), strict=True):
        np.testing.assert_allclose(got, rounded(right, dtype), rtol=1e-6)
    whole, _ = read_pages(pages, jnp.arange(NUM_PAGES), "float32")
    np.testing.assert_allclose(np.asarray(whole)[places // PAGE_SIZE, places % PAGE_SIZE], rounded(k, dtype), rtol=1e-6)


@each_dtype
def test_writing_a_token_changes_no_other_bit(dtype: str) -> None:
    first = KVWriteTargets(jnp.asarray([1, 1, 2]), jnp.asarray([0, 1, 5]))
    before = compiled_written(empty(dtype), numbers(0, 3), numbers(1, 3), first)
    after = compiled_written(before, numbers(2, 1), numbers(3, 1), KVWriteTargets(jnp.asarray([1]), jnp.asarray([2])))
    for old, new in zip(before, after, strict=True):
        bits = "uint8" if old.dtype.itemsize == 1 else "uint16"
        changed = np.asarray(old).view(bits) != np.asarray(new).view(bits)
        assert set(np.argwhere(changed)[:, 0]) == {1}
        assert set(np.argwhere(changed)[:, 1 if old.ndim == 4 else 2]) == {2}


@each_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none(dtype: str, bad: float) -> None:
    x = np.ones((2, 4), np.float32)
    x[1, 2] = bad
    codes, scales = jax.jit(coded, static_argnums=1)(jnp.asarray(x), jnp.dtype(dtype))
    assert np.isnan(np.asarray(scales, np.float32)).tolist() == [False, True]
    np.testing.assert_allclose(np.asarray(codes, np.float32)[0] * float(scales[0]), 1.0, rtol=0.01)


GPU = Kernels(partial(place_heads, interpret=True), interpreted)
STEPS = {"plain": PLAIN, "gpu": GPU} | ({"native": NATIVE} if library.load() else {})
KERNELS = {"plain": PLAIN.attend, "gpu": interpreted} | ({"native": NATIVE.attend} if library.load() else {})


@each_dtype
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("more", [{}, {"window": 21, "softcap": 0.8}], ids=str)
def test_every_kernel_attends_to_the_rounded_numbers(name: str, dtype: str, more: dict[str, Any]) -> None:
    spec = AttentionSpec(HEADS, 3, SIZE, 0.9, **more)
    rng = np.random.default_rng(4)
    starts, lengths = np.asarray([70, 3, 40]), np.asarray([1, 1, 30])
    table = np.zeros((3, 5), np.int32)
    attend = jax.jit(KERNELS[name])
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        end = start + length
        own = rng.permutation(NUM_PAGES - 1)[: -(-end // PAGE_SIZE)] + 1
        table[row] = 0
        table[row, : len(own)] = own
        k, v = rng.standard_normal((2, end, HEADS, SIZE)).astype(np.float32)
        places = KVWriteTargets(jnp.asarray(own[np.arange(end) // PAGE_SIZE]), jnp.asarray(np.arange(end) % PAGE_SIZE))
        pages = compiled_written(empty(dtype), jnp.asarray(k), jnp.asarray(v), places)
        q = rng.standard_normal((32 if length > 1 else 1, HEADS, 3, SIZE)).astype(np.float32)
        one = (jnp.asarray([number], jnp.int32) for number in (row, start, length, 0))
        tiles = Tiles(*one, num_single=int(length == 1))
        out = np.asarray(attend(jnp.asarray(q), PagedContext(spec, pages, jnp.asarray(table), tiles)))[:length]
        for index in range(length):
            keys, values = (rounded(array[: start + index + 1], dtype) for array in (k, v))
            expected = dense(spec, q[index], keys, values, start + index)
            np.testing.assert_allclose(out[index], expected, rtol=2e-3, atol=2e-4)


@each_dtype
def test_many_small_weights_count_in_float16(dtype: str) -> None:
    """One key is 8 above a thousand others, whose weights times the scales of values are below all of float16."""
    spec, count = AttentionSpec(1, 1, 16, 1.0), 1024
    k, v = np.zeros((count, 1, 16), np.float32), np.random.default_rng(5).uniform(0.015, 0.025, (count, 1, 16))
    k[0] = 0.5
    values = v.astype(np.float32)
    codes, scales = jnp.zeros((2, count, 1, 16), dtype), jnp.zeros((2, 1, count), jnp.bfloat16)
    places = KVWriteTargets(jnp.ones(count, jnp.int32), jnp.arange(count))
    pages = compiled_written(CodedPages(codes, codes, scales, scales), jnp.asarray(k), jnp.asarray(values), places)
    q = np.ones((1, 1, 1, 16), np.float32)
    tiles = Tiles(*(jnp.asarray([number], jnp.int32) for number in (0, count - 1, 1, 0)), num_single=1)
    how: Any = {"part": count, "tiling": Tiling(block=64, num_warps=4, num_stages=1), "interpret": True}
    out = decode_attention(jnp.asarray(q, jnp.float16), PagedContext(spec, pages, jnp.asarray([[1]]), tiles), **how)
    expected = dense(spec, q[0], rounded(k, dtype), rounded(values, dtype), count - 1)
    np.testing.assert_allclose(np.asarray(out[0], np.float32), expected, rtol=0.01)


@pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")
@each_dtype
def test_the_native_kernels_place_what_the_plain_ones_do(dtype: str) -> None:
    k, v = numbers(0, 20), numbers(1, 20)
    k[3, 1, 5], v[4, 0, 6] = np.nan, np.inf
    queries = np.random.default_rng(2).standard_normal((20, HEADS, 3, SIZE)).astype(np.float32)
    heads = joined(jnp.asarray(queries), jnp.asarray(k), jnp.asarray(v))
    places = np.arange(PAGE_SIZE, PAGE_SIZE + 20)
    targets = KVWriteTargets(jnp.asarray(places // PAGE_SIZE), jnp.asarray(places % PAGE_SIZE))
    (q, found), (right, expected) = (kernels.place(heads, empty(dtype), targets) for kernels in (PLAIN, NATIVE))
    np.testing.assert_array_equal(q, right)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@each_dtype
@pytest.mark.parametrize("name", STEPS)
def test_a_step_attends_as_without_rounding(name: str, dtype: str) -> None:
    """Rotated, with a norm, by what it has written itself: queries and keys meet each other in the same form."""
    spec, count, size = AttentionSpec(2, 3, 32, 32**-0.5), 40, 32
    rng = np.random.default_rng(6)
    angles = rng.uniform(0, 7, (count, size // 2)).astype(np.float32)
    rotation, norm = Rotation(jnp.cos(angles), jnp.sin(angles)), HeadNorm(jnp.ones(size), 1e-6)
    heads = Heads(jnp.asarray(rng.standard_normal((count, 2, 5, size)), jnp.float32), rotation, norm, norm)
    at = jnp.arange(count)
    access = PageAccess(
        KVWriteTargets(1 + at // PAGE_SIZE, at % PAGE_SIZE),
        jnp.asarray([[1, 2, 3]]),
        Tiles(jnp.zeros(2, jnp.int32), jnp.asarray([0, 32]), jnp.asarray([32, 8]), jnp.asarray([0, 32]), num_single=0),
    )
    codes, scales = jnp.zeros((4, PAGE_SIZE, 2, size), dtype), jnp.zeros((4, 2, PAGE_SIZE), jnp.bfloat16)
    run = jax.jit(partial(step_attention, STEPS[name], spec))
    out, _ = run(heads, CodedPages(codes, codes, scales, scales), access)
    exact, _ = compiled_whole(spec, heads, None)
    error = np.linalg.norm(np.asarray(out)[:count] - np.asarray(exact)) / np.linalg.norm(exact)
    assert 0 < error < (0.01 if dtype == "int8" else 0.05)
