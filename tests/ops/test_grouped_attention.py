"""Grouped attention against dense attention in numpy, over random page tables, ragged groups, windows and caps."""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.attention_spec import AttentionSpec
from quire.ops.gpu.decode_attention import Tiling, decode_attention
from quire.ops.gpu.fill_attention import fill_attention
from quire.ops.gpu.kernels import GPU
from quire.ops.grouped_attention import SPAN, Groups, grouped_attention
from quire.ops.step_attention import NATIVE, PLAIN, kernels_for
from tests.models.tiny import COMPILE_QUICKLY
from tests.ops.test_attention import dense

Array = np.ndarray[Any, Any]
HEAD_DIM = 4
NUM_GROUPS = 3
GroupedAttention = Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array, Groups], jax.Array]


def interpreted(spec: AttentionSpec, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, groups: Groups) -> jax.Array:
    """What a GPU runs, with small blocks, so that short contexts have several."""
    if q.shape[1] > 1:
        return fill_attention(spec, q, k_pages, v_pages, groups, block=32, interpret=True)
    tiling = Tiling(block=16, num_warps=4, num_stages=1)
    return decode_attention(spec, q[:, 0], k_pages, v_pages, groups, parts=4, tiling=tiling, interpret=True)[:, None]


# Those in use that are different, with their names; there is no native one where nothing can build it.
IN_USE: dict[str, GroupedAttention] = {
    "plain": grouped_attention,
    "gpu": interpreted,
    kernels_for("cpu", "float32", num_devices=1).attend.__module__: kernels_for("cpu", "float32", 1).attend,
}
implementations = pytest.mark.parametrize("implementation", IN_USE)


class Shape(NamedTuple):
    """What is compiled for: few, and between them every option alone, all together, and every kind of page size."""

    spec: AttentionSpec
    page_size: int
    queries: int  # of a group
    width: int  # of the page table


def spec(kv_heads: int = 2, group: int = 2, **fields: Any) -> AttentionSpec:
    return AttentionSpec(kv_heads=kv_heads, group=group, head_dim=HEAD_DIM, scale=0.9, **fields)


SHAPES = (
    Shape(spec(1, 1), page_size=1, queries=1, width=300),  # three spans, the last not full
    Shape(spec(2, 3), page_size=16, queries=1, width=20),
    Shape(spec(window=5), page_size=16, queries=1, width=20),
    Shape(spec(softcap=0.8), page_size=64, queries=32, width=5),
    Shape(spec(window=1), page_size=7, queries=32, width=45),  # a span that is no multiple of anything
    Shape(spec(window=150, softcap=0.8), page_size=3, queries=32, width=100),  # a window longer than a span
    Shape(spec(window=9), page_size=SPAN + 32, queries=32, width=2),  # a page longer than a span
    Shape(spec(1, 4), page_size=SPAN * 2, queries=1, width=1),
)


class Group(NamedTuple):
    start: int
    length: int  # 0: padding


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, list[Group]]:
    shape = draw(st.sampled_from(SHAPES))
    positions = shape.page_size * shape.width
    groups = []
    for _ in range(NUM_GROUPS):
        length = draw(st.integers(0, min(shape.queries, positions)))
        groups.append(Group(draw(st.integers(0, positions - max(length, 1))), length))
    return shape, groups


@cache
def compiled(implementation: str, spec: AttentionSpec) -> Any:
    return jax.jit(partial(IN_USE[implementation], spec), compiler_options=COMPILE_QUICKLY)


def run(implementation: str, shape: Shape, groups: list[Group], seed: int) -> tuple[Array, Array]:
    """What came out and what should have. Everything no group may read is NaN: padding, the unused parts of pages,
    whole pages, and the positions after a group's last query."""
    spec, page_size, queries, width = shape
    rng = np.random.default_rng(seed)
    num_pages = 1 + len(groups) * width
    table = rng.permutation(np.arange(1, num_pages)).reshape(len(groups), width).astype(np.int32)
    keys, values = rng.normal(size=(2, len(groups), page_size * width, spec.kv_heads, HEAD_DIM)).astype(np.float32)
    k_pages = np.full((num_pages, page_size, spec.kv_heads, HEAD_DIM), np.nan, np.float32)
    v_pages = k_pages.copy()
    q = rng.normal(size=(len(groups), queries, spec.kv_heads, spec.group, HEAD_DIM)).astype(np.float32)
    expected = np.zeros_like(q)
    for row, (start, length) in enumerate(groups):
        for position in range(start + length if length else 0):
            where = table[row, position // page_size], position % page_size
            k_pages[where], v_pages[where] = keys[row, position], values[row, position]
        q[row, length:] = np.nan  # a padding query's own value means nothing either
        for query in range(length):
            expected[row, query] = dense(spec, q[row, query], keys[row], values[row], start + query)
        table[row, -(-(start + length) // page_size) if length else 0 :] = 0  # what lies beyond names the padding page
    starts, lengths = np.asarray(groups, np.int32).T
    out = compiled(implementation, spec)(q, k_pages, v_pages, Groups(table, starts, lengths))
    return np.asarray(out), expected


@implementations
@settings(max_examples=120)
@given(case=cases(), seed=st.integers(0, 99))
def test_grouped_attention_is_dense_attention(implementation: str, case: tuple[Shape, list[Group]], seed: int) -> None:
    shape, groups = case
    out, expected = run(implementation, shape, groups, seed)
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-5)


@implementations
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_and_the_last_positions_of_a_table_are_read(implementation: str, shape: Shape) -> None:
    last = shape.page_size * shape.width - shape.queries
    out, expected = run(
        implementation, shape, [Group(0, shape.queries), Group(last, shape.queries), Group(0, 1)], seed=0
    )
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-5)


@implementations
@pytest.mark.parametrize("shape", SHAPES)
def test_groups_of_padding_come_out_as_zeros(implementation: str, shape: Shape) -> None:
    out, _ = run(implementation, shape, [Group(0, 0), Group(1, 1), Group(3, 0)], seed=0)
    assert np.all(out[[0, 2]] == 0)
    out, _ = run(implementation, shape, [Group(0, 0)] * 3, seed=0)
    assert np.all(out == 0)


@implementations
@pytest.mark.parametrize(("window", "reads_the_first_span"), [(None, True), (4, False)])
def test_spans_before_every_window_are_not_read(
    implementation: str, window: int | None, reads_the_first_span: bool
) -> None:
    shape = SHAPES[1]
    q, k_pages, v_pages = _arrays(shape)
    k_pages[1], v_pages[1] = np.inf, np.inf  # times a weight of 0 they would be NaN
    table = np.tile(np.arange(1, shape.width + 1, dtype=np.int32), (NUM_GROUPS, 1))
    starts = np.full(NUM_GROUPS, 2 * SPAN + 3, np.int32)
    groups = Groups(table, starts, np.ones(NUM_GROUPS, np.int32))
    out = compiled(implementation, spec(2, 3, window=window))(q, k_pages, v_pages, groups)
    assert np.isnan(np.asarray(out)).any() == reads_the_first_span


def test_the_number_of_spans_read_is_found_at_run_time() -> None:
    shape = SHAPES[1]
    groups = Groups(*(np.zeros(size, np.int32) for size in ((NUM_GROUPS, shape.width), NUM_GROUPS, NUM_GROUPS)))
    traced = jax.make_jaxpr(partial(grouped_attention, shape.spec))(*_arrays(shape), groups)
    loops = [equation.primitive.name for equation in traced.eqns if equation.primitive.name in ("while", "scan")]
    assert loops == ["while"]  # a loop of a fixed number of turns would be a scan


def _arrays(shape: Shape) -> tuple[Array, Array, Array]:
    q = np.ones((NUM_GROUPS, shape.queries, shape.spec.kv_heads, shape.spec.group, HEAD_DIM), np.float32)
    pages = np.ones((shape.width + 1, shape.page_size, shape.spec.kv_heads, HEAD_DIM), np.float32)
    return q, pages, pages.copy()


@implementations
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_not_a_number_shows_in_its_own_group_alone(implementation: str, where: str) -> None:
    """So that a request whose values overflow is found, and its neighbours are spared."""
    shape = SHAPES[1]
    arrays = dict(zip("qkv", _arrays(shape), strict=True))
    table = np.asarray([[1, 2], [3, 4], [5, 6]], np.int32)
    arrays[where][1 if where == "q" else 3] = np.nan
    groups = Groups(table, np.full(NUM_GROUPS, 17, np.int32), np.ones(NUM_GROUPS, np.int32))
    out = np.asarray(compiled(implementation, shape.spec)(*arrays.values(), groups))
    assert np.isnan(out).any(axis=(1, 2, 3, 4)).tolist() == [False, True, False]
    assert np.allclose(out[[0, 2]], 1)


def test_the_smallest_numbers_are_not_zero_once_the_implementations_are_loaded() -> None:
    """A library that is linked for fast arithmetic can set the processor so, for everything else in the process."""
    assert IN_USE
    assert sys.float_info.min / 2 > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pages_of_a_smaller_type_are_summed_in_float32(dtype: str) -> None:
    """A thousand equal weights summed in bfloat16 would stop growing at 256."""
    shape = Shape(spec(1, 1), page_size=64, queries=1, width=20)
    q, k_pages, v_pages = (jnp.asarray(array, dtype) for array in _arrays(shape))
    table = np.tile(np.arange(1, shape.width + 1, dtype=np.int32), (NUM_GROUPS, 1))
    groups = Groups(table, np.asarray([999, 511, 2], np.int32), np.ones(NUM_GROUPS, np.int32))
    implementation = kernels_for("cpu", dtype, num_devices=1).attend
    out = jax.jit(partial(implementation, shape.spec))(q, k_pages, v_pages, groups)
    assert out.dtype == dtype
    assert np.all(np.asarray(out, np.float32) == 1)


def test_every_platform_has_kernels_and_several_devices_have_those_that_xla_can_cut() -> None:
    assert kernels_for("cpu", "float32", num_devices=1) in (NATIVE, PLAIN)
    assert kernels_for("cpu", "bfloat16", num_devices=1) is PLAIN
    assert kernels_for("gpu", "bfloat16", num_devices=1) is kernels_for("gpu", "float32", num_devices=1) is GPU
    assert kernels_for("tpu", "bfloat16", num_devices=1) is PLAIN
    assert all(kernels_for(platform, "float32", num_devices=8) is PLAIN for platform in ("cpu", "gpu", "tpu"))
