"""A row's numbers do not depend on how many rows are beside it: bit by bit, for every operation that is not
elementwise."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.executor.programs.compiler import cpu_options
from quire.executor.sample.filters import filtered
from quire.executor.sample.sampler import describe, draw
from quire.ops import norms
from quire.ops.attention.spec import AttentionSpec
from quire.ops.native import float_product, library
from quire.ops.native import norms as native_norms
from quire.ops.native.attention import tiled_attention
from quire.ops.pages import PagedContext, Tiles
from tests.compiling import AS_SERVED

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")

MOST_ROWS = 70
sizes = st.sampled_from([1, 3, 16, 31, 64, 100, 576])
some_rows = st.integers(1, MOST_ROWS)


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def assert_rows_alike(compute: Any, x: Array, first: int, count: int) -> None:
    """Rows [first, first + count) of x give alone what they give among all."""
    among = compute(x)
    alone = compute(x[first : first + count])
    for one, all_of_them in zip(jax.tree.leaves(alone), jax.tree.leaves(among), strict=True):
        np.testing.assert_array_equal(one, all_of_them[first : first + count])


@jax.jit  # one program for each shape; each operation by itself would be one
def native_norms_of(x: Any, weight: Any, bias: Any) -> Any:
    rms, added = native_norms.rms_norm(x, weight, 1e-5, 1.0), native_norms.add_rms_norm(x, x * 2, weight, 1e-5, 0.0)
    return rms, added, native_norms.layer_norm(x, weight, bias, 1e-5)


@given(size=sizes, first=some_rows, count=some_rows, seed=st.integers(0, 9))
@settings(max_examples=30)
def test_norms_of_rows(size: int, first: int, count: int, seed: int) -> None:
    x, weight, bias = numbers(seed, MOST_ROWS * 2, size), numbers(seed + 1, size), numbers(seed + 2, size)
    assert_rows_alike(lambda x: native_norms_of(x, weight, bias), x, first, count)


@given(size=sizes, width=st.sampled_from([1, 4, 7, 130]), first=some_rows, count=some_rows, seed=st.integers(0, 9))
@settings(max_examples=40)
def test_float_products_of_rows(size: int, width: int, first: int, count: int, seed: int) -> None:
    x, weight = numbers(seed, MOST_ROWS * 2, size), numbers(seed + 1, width, size)
    assert_rows_alike(lambda x: float_product.product(jnp.asarray(x), jnp.asarray(weight)), x, first, count)


grouped_product = jax.jit(float_product.grouped_product)


@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6), seed=st.integers(0, 9))
@settings(max_examples=30)
def test_each_group_of_rows_meets_its_own_matrix(lengths: list[int], seed: int) -> None:
    rows = -(-(sum(lengths) + 3) // 41) * 41  # of few numbers, as each is compiled; the last belong to none
    x, weights = numbers(seed, rows, 33), numbers(seed + 1, len(lengths), 10, 33)
    out = np.asarray(grouped_product(x, weights, np.asarray(lengths, np.int32)))
    start = 0
    for length, weight in zip(lengths, weights, strict=True):
        alone = float_product.product(x[start : start + length], weight)
        np.testing.assert_array_equal(out[start : start + length], alone)
        start += length
    assert not out[start:].any()


@given(rows=some_rows, size=sizes, width=st.integers(1, 40), seed=st.integers(0, 9))
@settings(max_examples=30)
def test_native_norms_and_products_are_those_of_the_reference(rows: int, size: int, width: int, seed: int) -> None:
    x, y, weight = numbers(seed, rows, size), numbers(seed + 1, rows, size), numbers(seed + 2, size)
    bias, matrix = numbers(seed + 3, size), numbers(seed + 4, width, size)

    @jax.jit
    def computed(x: Any, y: Any, weight: Any, bias: Any, matrix: Any) -> Any:
        native = native_norms.rms_norm(x, weight, 1e-5, 1.0), native_norms.add_rms_norm(x, y, weight, 1e-5, 0.0)
        plain = norms.rms_norm(x, weight, 1e-5, 1.0), norms.add_rms_norm(x, y, weight, 1e-5, 0.0)
        layers = native_norms.layer_norm(x, weight, bias, 1e-2), norms.layer_norm(x, weight, bias, 1e-2)
        return (*native, layers[0]), (*plain, layers[1]), float_product.product(x, matrix)

    found, expected, product = computed(x, y, weight, bias, matrix)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    exact = x.astype(np.float64) @ matrix.astype(np.float64).T
    np.testing.assert_allclose(product, exact, rtol=1e-5, atol=1e-5 * size)


def test_a_norm_of_all_heads_and_one_of_each_are_those_of_the_reference() -> None:
    x = numbers(0, 5, 2, 3, 8)
    for weight in (numbers(1, 8), numbers(2, 2, 3, 8)):
        np.testing.assert_allclose(
            native_norms.rms_norm(jnp.asarray(x), weight, 1e-6, 0.0), norms.rms_norm(x, weight, 1e-6), rtol=1e-5
        )


@given(
    head_dim=st.sampled_from([8, 20, 64, 80]),
    option=st.sampled_from([{}, {"window": 1}, {"window": 9}, {"window": 70}, {"chunk": 12}]),
    softcap=st.sampled_from([None, 5.0]),
    start=st.integers(0, 180),
    count=st.integers(1, 32),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_attention_of_a_query_does_not_depend_on_its_tile_nor_on_its_neighbours(
    head_dim: int, option: dict[str, int], softcap: float | None, start: int, count: int, seed: int
) -> None:
    page_size, heads, per_head = 8, 2, 3
    num_pages = -(-(start + count) // page_size)
    table = jnp.asarray(np.random.default_rng(seed).permutation(num_pages).astype(np.int32)[None])
    pages = tuple(jnp.asarray(numbers(seed + n, num_pages, page_size, heads, head_dim)) for n in (1, 2))
    q = numbers(seed + 3, count, heads, per_head, head_dim)
    spec = AttentionSpec(heads, per_head, head_dim, head_dim**-0.5, softcap=softcap, **option)

    def attend(*lengths: int, single: int = 0) -> Array:
        """All queries, cut into tiles of these lengths."""
        offsets = np.cumsum([0, *lengths[:-1]])
        tiles = (np.zeros(len(lengths)), start + offsets, lengths, offsets)
        cut = Tiles(*(jnp.asarray(array, jnp.int32) for array in tiles), num_single=single)
        return np.asarray(tiled_attention(jnp.asarray(q), PagedContext(spec, (pages[0], pages[1]), table, cut)))

    together = attend(count)
    np.testing.assert_array_equal(attend(*[1] * count, single=count), together)
    half = count // 2
    if half:
        np.testing.assert_array_equal(attend(half, count - half), together)
        np.testing.assert_array_equal(attend(*[1] * half, count - half, single=half), together)


MOST_SAMPLED = 128


@cache
def sampled(count: int) -> Any:
    """From the first rows of the same logits, by the programs' own options: the sums are over the vocabulary."""
    size, most = 49_152, MOST_SAMPLED
    logits = numbers(0, most, size) * 3
    logits -= logits.max(axis=1, keepdims=True)
    uniform = np.random.default_rng(1).random((most, 2), dtype=np.float32)
    wanted = np.tile(np.array([1.0, 0.9, 1e-4, 0.95, 1.0, 0.0, 0.0], np.float32), (most, 1))
    top_k = np.full(most, 5_000, np.int32)

    def compute(logits: Any, uniform: Any, top_k: Any, wanted: Any) -> Any:
        plain, running = draw(logits, uniform)
        return plain, running, draw(filtered(logits, top_k, wanted), uniform), describe(logits, plain, True)

    inputs = [array[:count] for array in (logits, uniform, top_k, wanted)]
    return jax.jit(compute).lower(*inputs).compile(cpu_options() | AS_SERVED)(*inputs)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 32])
def test_sampling_from_rows(rows: int) -> None:
    for one, among in zip(jax.tree.leaves(sampled(rows)), jax.tree.leaves(sampled(MOST_SAMPLED)), strict=True):
        np.testing.assert_array_equal(one, among[:rows])
