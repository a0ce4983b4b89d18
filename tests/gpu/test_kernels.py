"""The kernels for GPUs against the plain ones, on a GPU where there is one and interpreted elsewhere.

Every page that is not read holds NaN, and so does the unused part of those that are.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.heads import HeadNorm, Heads, Rotation
from quire.ops.attention.reference import causal_attention
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import place
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu.adapter_product import add_products as adapter_product
from quire.ops.gpu.add_norm import add_norm
from quire.ops.gpu.capability import GpuCapability
from quire.ops.gpu.decode_attention import OF_CODES, decode_attention
from quire.ops.gpu.place_heads import place_heads
from quire.ops.gpu.prefill_attention import MANY, ONE_ORDER, SOME, Tiling, prefill_attention
from quire.ops.norms import add_rms_norm as plain_add_norm
from quire.ops.pages import (
    TILE,
    CodedPages,
    KVWriteTargets,
    PagedContext,
    Pages,
    Segments,
    SharedPrefixes,
    Tiles,
    coded,
    read_pages,
)
from quire.ops.weights.adapters import AdapterStack, JoinedStack
from quire.ops.weights.adapters import add_products as plain_adapter_product
from tests.ops.test_attention import sinks_of

pytestmark = pytest.mark.gpu
INTERPRET = jax.default_backend() != "gpu"
WIDTH = 20  # pages of a sequence
SPECS = {
    "8B": AttentionSpec(8, 4, 128, 0.088),
    "135M": AttentionSpec(3, 3, 64, 0.125),
    "head 80, window": AttentionSpec(2, 4, 80, 0.1, window=100),
    "head 96, no groups": AttentionSpec(4, 1, 96, 0.1),
    "head 256, cap": AttentionSpec(2, 8, 256, 0.06, softcap=30.0),
    "groups of 16, window, cap": AttentionSpec(1, 16, 64, 0.125, window=33, softcap=20.0),
    "groups of 8, window, sinks": AttentionSpec(8, 8, 64, 0.125, window=128, has_sinks=True),
    "groups of 8, sinks": AttentionSpec(2, 8, 64, 0.125, has_sinks=True),
}
CACHE_DTYPES = ("float8_e4m3fn", "int8")
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4}  # of the norm
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)
# Every model with every type, and in turns with every size of pages: each is compiled.
each_case = pytest.mark.parametrize(
    ("name", "dtype", "page_size"),
    [
        (name, dtype, (16, 32, 64)[(row + column) % 3])
        for row, name in enumerate(SPECS)
        for column, dtype in enumerate(TOLERANCE)
    ],
)


def paged(
    spec: AttentionSpec,
    page_size: int,
    dtype: str,
    places: list[tuple[int, int]],
    num_single: int,
    width: int = WIDTH,
) -> tuple[jax.Array, Pages, jax.Array, Tiles]:
    """Queries, pages, page tables and tiles of (start, length) each; the first so many are single tokens."""
    rng = np.random.default_rng(page_size)
    count = len(places)
    table = rng.permutation(np.arange(1, count * width + 1)).reshape(count, width).astype(np.int32)
    pages = rng.normal(size=(2, count * width + 1, page_size, spec.kv_heads, spec.head_dim)).astype(np.float32)
    pages[:, 0] = np.nan
    for row, (start, length) in enumerate(places):
        end = start + length if length else 0
        first = 0 if spec.window is None else max(0, start - spec.window + 1)
        for position in (*range(first), *range(end, page_size * width)):
            pages[:, table[row, position // page_size], position % page_size] = np.nan
        table[row, : first // page_size] = 0
        table[row, -(-end // page_size) :] = 0
    starts, lengths = np.asarray(places, np.int32).T
    offsets = np.cumsum(lengths, dtype=np.int32) - lengths
    tiles = Tiles(*map(jnp.asarray, (np.arange(count, dtype=np.int32), starts, lengths, offsets)), num_single)
    tokens = num_single + (count - num_single) * TILE
    q = jax.random.normal(jax.random.key(0), (tokens, spec.kv_heads, spec.group, spec.head_dim), dtype)
    return q, (jnp.asarray(pages[0], dtype), jnp.asarray(pages[1], dtype)), jnp.asarray(table), tiles


def in_codes(pages: Pages, cache_dtype: str) -> CodedPages:
    """The same numbers in eight bits; those that are NaN have scales that are NaN."""
    (k, k_scales), (v, v_scales) = (coded(array, jnp.dtype(cache_dtype)) for array in pages)
    return CodedPages(k, v, *(jnp.swapaxes(scales, 1, 2) for scales in (k_scales, v_scales)))


def check(out: Any, expected: Any, dtype: str) -> None:
    got, right = np.asarray(out, np.float32), np.asarray(expected, np.float32)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - right) <= TOLERANCE[dtype] * np.linalg.norm(right)


@each_case
def test_decodes_read_their_contexts(name: str, dtype: str, page_size: int) -> None:
    spec = SPECS[name]
    longest = page_size * WIDTH - 1
    positions = [0, 1, 63, 64, min(299, longest), longest, 17]
    places = [*((position, 1) for position in positions), (5, 0)]
    q, *given = paged(spec, page_size, dtype, places, num_single=len(places))
    context = PagedContext(spec, *given, sinks_of(spec))
    expected = tiled_attention(q, context)
    for part in (64, 1024) if dtype == "bfloat16" else (64,):
        run = jax.jit(partial(decode_attention, part=part, interpret=INTERPRET))
        check(run(q, context), expected, dtype)


def test_pages_may_be_of_any_size() -> None:
    spec = SPECS["head 80, window"]
    q, *given = paged(spec, 24, "bfloat16", [(0, 1), (131, 1), (400, 1)], num_single=3)
    run, context = jax.jit(partial(decode_attention, part=64, interpret=INTERPRET)), PagedContext(spec, *given)
    check(run(q, context), tiled_attention(q, context), "bfloat16")


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_decodes_read_values_of_very_different_sizes(cache_dtype: str) -> None:
    spec = SPECS["135M"]
    q, (k, v), table, tiles = paged(spec, 32, "bfloat16", [(100, 1), (300, 1)], num_single=2)
    sizes = 10.0 ** jax.random.uniform(jax.random.key(3), (*v.shape[:2], 1, 1), minval=-6, maxval=6)
    context = PagedContext(spec, in_codes((k, (v * sizes).astype(v.dtype)), cache_dtype), table, tiles)
    expected = tiled_attention(q, context)
    for tiling in (None, OF_CODES):  # of few rows, and of many
        run = jax.jit(partial(decode_attention, tiling=tiling, interpret=INTERPRET))
        out = run(q, context)
        for row in range(2):
            check(out[row], expected[row], "bfloat16")


def with_shared(page_table: jax.Array, tiles: Tiles, page_size: int) -> tuple[jax.Array, Tiles]:
    """Of the single tokens some begin with the pages of others: two groups, of which one has two tiles. The last one
    is padding."""
    table, starts = np.array(page_table), np.asarray(tiles.starts)
    members = [[1, 5], [3, 6], [2, 4]]
    of_tile, lengths, slots = np.full(tiles.num_single, -1), [192, 192, 64, 0], [1, 1, 2, 0]
    rows = np.full((4, TILE), -1)
    for tile, its_rows in enumerate(members):
        rows[tile, [2, 3]], of_tile[its_rows] = its_rows, tile
        assert starts[its_rows].min() >= lengths[tile]
        table[its_rows, : lengths[tile] // page_size] = table[slots[tile], : lengths[tile] // page_size]
    rows[1, 7], of_tile[-1] = tiles.num_single - 1, 1
    given = (jnp.asarray(one, jnp.int32) for one in (of_tile, rows, slots, lengths))
    return jnp.asarray(table), replace(tiles, shared=SharedPrefixes(*given))


@each_case
def test_decodes_that_share_pages_read_them_together(name: str, dtype: str, page_size: int) -> None:
    spec = SPECS[name]
    longest = page_size * WIDTH - 1
    positions = [longest, 192, 64, 193, 130, longest, 300, 0]
    places = [*((position, 1) for position in positions), (5, 0)]
    q, pages, page_table, tiles = paged(replace(spec, window=None), page_size, dtype, places, num_single=len(places))
    context = PagedContext(spec, pages, *with_shared(page_table, tiles, page_size), sinks_of(spec))
    expected = tiled_attention(q, context)
    for part in (64, 1024) if dtype == "bfloat16" else (64,):
        run = jax.jit(partial(decode_attention, part=part, interpret=INTERPRET))
        check(run(q, context), expected, dtype)
    if name == "8B" and dtype != "float32":
        over_codes = replace(context, pages=in_codes(pages, "int8" if dtype == "float16" else "float8_e4m3fn"))
        check(run(q, over_codes), tiled_attention(q, over_codes), dtype)


@each_case
def test_decodes_that_share_pages_read_them_in_packs_with_the_bits_that_they_have_alone(
    name: str, dtype: str, page_size: int
) -> None:
    """In short parts some have them of two lengths, so that not all of a group are in packs."""
    spec = SPECS[name]
    longest = page_size * WIDTH - 1
    positions = [longest, 192, 64, 193, 130, longest, 300, 0]
    places = [*((position, 1) for position in positions), (5, 0)]
    q, pages, page_table, tiles = paged(replace(spec, window=None), page_size, dtype, places, num_single=len(places))
    table, shared = with_shared(page_table, tiles, page_size)
    coded = [in_codes(pages, each) for each in CACHE_DTYPES] if name == "8B" and dtype == "bfloat16" else []
    for given in (pages, *coded):
        context = PagedContext(spec, given, table, tiles, sinks_of(spec))
        for part in (32, 64):
            how: Any = {"part": part, "in_packs": True, "interpret": INTERPRET}
            run = jax.jit(partial(decode_attention, **how))
            alone, packed = (run(q, replace(context, tiles=each)) for each in (tiles, shared))
            assert np.array_equal(*(np.asarray(each[: len(positions)].astype(jnp.float32)) for each in (alone, packed)))
            check(packed, tiled_attention(q, context), dtype)


@each_case
def test_tiles_of_prefills_read_their_contexts_and_leave_the_decodes_before_them(
    name: str, dtype: str, page_size: int
) -> None:
    spec = SPECS[name]
    places = [(70, 1), (3, 1), (0, 32), (1, 32), (63, 20), (64, 1), (128, 0), (page_size * WIDTH - 32, 32)]
    q, *given = paged(spec, page_size, dtype, places, num_single=2)
    tokens = sum(length for _, length in places)
    context = PagedContext(spec, *given, sinks_of(spec))
    decodes, prefills = context.part(0, 2), context.part(2, len(places))

    @partial(jax.jit, static_argnums=(1, 2))
    def run(q: jax.Array, part: int | None, tiling: Tiling | None) -> jax.Array:
        out = decode_attention(q, decodes, interpret=INTERPRET)
        return prefill_attention(q, prefills, out, part=part, tiling=tiling, interpret=INTERPRET)

    ways: list[tuple[int | None, Tiling | None]] = [(64, None)]
    if dtype == "bfloat16":
        ways += [(1024, None), (None, None)]
    if dtype == "bfloat16" and name == "8B":  # those of steps with more tokens
        ways += [(1024, SOME)] if INTERPRET else [(1024, SOME), (1024, MANY), (1024, ONE_ORDER)]
    for part, tiling in ways:
        check(run(q, part, tiling)[:tokens], tiled_attention(q, context)[:tokens], dtype)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize(
    ("name", "dtype", "page_size"),
    [("8B", "bfloat16", 32), ("head 80, window", "float16", 16), ("groups of 16, window, cap", "float32", 64)],
)
def test_contexts_in_eight_bits_are_read_as_the_plain_kernel_reads_them(
    name: str, dtype: str, page_size: int, cache_dtype: str
) -> None:
    spec = SPECS[name]
    places = [(70, 1), (page_size * WIDTH - 1, 1), (0, 32), (63, 20), (64, 1), (128, 0), (page_size * WIDTH - 32, 32)]
    q, pages, table, tiles = paged(spec, page_size, dtype, places, num_single=2)
    tokens = sum(length for _, length in places)
    context = PagedContext(spec, in_codes(pages, cache_dtype), table, tiles)
    decodes, prefills = context.part(0, 2), context.part(2, len(places))

    @partial(jax.jit, static_argnums=1)
    def run(q: jax.Array, part: int) -> jax.Array:
        out = decode_attention(q, decodes, part=part, interpret=INTERPRET)
        return prefill_attention(q, prefills, out, part=part, interpret=INTERPRET)

    expected = tiled_attention(q, context)[:tokens]
    for part in (64, 1024) if dtype == "bfloat16" else (64,):
        check(run(q, part)[:tokens], expected, dtype)
    exact = np.asarray(tiled_attention(q, replace(context, pages=pages)), np.float32)
    rounded = np.asarray(expected, np.float32)
    assert 0 < np.linalg.norm(rounded - exact[:tokens]) < 0.1 * np.linalg.norm(rounded)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("tokens", [8, 600])
def test_heads_are_written_in_eight_bits_each_with_its_scale(cache_dtype: str, tokens: int) -> None:
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 7, (tokens, 40))
    sizes = np.exp(rng.uniform(-8, 8, (tokens, 2, 1, 1)))
    rotation = Rotation(jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    heads = Heads(jnp.asarray(rng.normal(size=(tokens, 2, 4, 80)) * sizes, jnp.bfloat16), rotation)
    slots = rng.permutation(np.arange(16, 64 * 16))[:tokens]
    targets = KVWriteTargets(jnp.asarray(slots // 16), jnp.asarray(slots % 16))
    pages = in_codes(tuple(jnp.asarray(rng.normal(size=(64, 16, 2, 80)), jnp.bfloat16) for _ in range(2)), cache_dtype)
    q, right = place(heads, pages, targets)
    got_q, got = jax.jit(partial(place_heads, interpret=INTERPRET))(heads, pages, targets)
    assert isinstance(got, CodedPages)
    check(got_q, q, "bfloat16")
    for one, other in zip(got[2:], right[2:], strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0.01)
    for one, other in zip(
        read_pages(got, jnp.arange(1, 64), "float32"), read_pages(right, jnp.arange(1, 64), "float32"), strict=True
    ):
        check(one, other, "bfloat16")


@pytest.mark.parametrize("tokens", [8, 600])
@each_dtype
def test_heads_are_finished_and_written(dtype: str, tokens: int) -> None:
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 7, (tokens, 64))
    norm = HeadNorm(jnp.asarray(rng.normal(size=128), dtype), 1e-6)
    heads = Heads(
        jnp.asarray(rng.normal(size=(tokens, 8, 4, 128)), dtype),
        Rotation(jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)),
        norm,
        norm,
    )
    slots = rng.permutation(np.arange(16, 64 * 16))[:tokens]
    targets = KVWriteTargets(jnp.asarray(slots // 16), jnp.asarray(slots % 16))
    pages = tuple(jnp.asarray(rng.normal(size=(64, 16, 8, 128)), dtype) for _ in range(2))
    q, right = place(heads, pages, targets)
    got, written = jax.jit(partial(place_heads, interpret=INTERPRET))(heads, pages, targets)
    check(got, q, dtype)
    for one, other in zip(written, right, strict=True):
        check(one[1:], other[1:], dtype)


@each_dtype
@pytest.mark.parametrize("shape", [(3, 576), (8, 1024), (1, 4096), (33, 2304)], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_sum_and_its_norm_are_those_of_the_plain_functions(shape: tuple[int, int], dtype: str, offset: float) -> None:
    chance = np.random.default_rng(0)
    x, out = (jnp.asarray(chance.normal(size=shape), dtype) for _ in range(2))
    weight = jnp.asarray(chance.normal(size=shape[1]), dtype)
    total, normal = add_norm(x, out, weight, 1e-5, offset, interpret=INTERPRET)
    right_total, right_normal = plain_add_norm(x, out, weight, 1e-5, offset)
    assert np.array_equal(np.asarray(total), np.asarray(right_total))
    check(normal, right_normal, dtype)


@pytest.mark.skipif(INTERPRET, reason="cuDNN is not elsewhere")
@pytest.mark.parametrize("lengths", [[2048] * 4, [700, 33, 1500, 1, 640], [5000]], ids=str)
def test_new_prompts_are_attended_to_by_cudnn_as_by_the_plain_kernel(lengths: list[int]) -> None:
    if not GpuCapability.of(None).packed_attention:
        pytest.skip("this JAX attends to one sequence alone")
    spec, tokens = SPECS["8B"], 8192
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(tokens, 8, *parts, 128)), jnp.bfloat16) for parts in ((4,), (), ()))
    none = [-1] * (gpu_kernels.MAX_FRESH_SEQUENCES - len(lengths))
    offsets = np.cumsum([0, *lengths[:-1]]).tolist()
    segments = Segments(*(jnp.asarray(those + none, jnp.int32) for those in (offsets, lengths)))
    out = gpu_kernels.attend_fresh(spec, q, k, v, segments)
    for offset, length in zip(offsets, lengths, strict=True):
        those = slice(offset, offset + length)
        check(out[those], causal_attention(spec, q[those], k[those], v[those]), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("tokens", "slots", "rank"), [(32, 8, 16), (1, 8, 16), (300, 8, 16), (40, 20, 8), (70, 4, 128)]
)
def test_products_with_adapters_are_those_of_the_plain_function(dtype: str, tokens: int, slots: int, rank: int) -> None:
    chance = np.random.default_rng(0)
    runs, inputs = ((128, 0), (64, 1), (64, 2)) * 2, 1536
    a = jnp.asarray(chance.normal(size=(slots, 3, rank, inputs)) / inputs**0.5, dtype)
    b = jnp.asarray(chance.normal(size=(slots, rank, 512)) / rank**0.5, dtype)
    stack = AdapterStack(a, b, jnp.full(slots, rank, jnp.int32), runs)
    rows = jnp.asarray(chance.integers(0, slots + 1, tokens), jnp.int32)
    out, x = (jnp.asarray(chance.normal(size=(tokens, size)), dtype) for size in (512, inputs))
    right = np.asarray(plain_adapter_product(out, x, rows, stack), np.float32)
    got = np.asarray(jax.jit(partial(adapter_product, interpret=INTERPRET))(out, x, rows, stack), np.float32)
    check(got, right, dtype)
    without = np.asarray(rows) == 0
    np.testing.assert_array_equal(got[without], np.asarray(out, np.float32)[without])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("tokens", "slots", "rank"), [(32, 8, 16), (1, 8, 16), (300, 8, 16), (40, 20, 8), (70, 4, 128)]
)
def test_products_with_adapters_below_a_weight_are_those_of_the_plain_function(
    dtype: str, gated: bool, tokens: int, slots: int, rank: int
) -> None:
    chance = np.random.default_rng(0)
    runs = ((256, 0), (256, 1)) if gated else ((128, 0), (64, 1), (64, 2)) * 2
    b = jnp.asarray(chance.normal(size=(slots, rank, 512)) / rank**0.5, dtype)
    stack = JoinedStack(None, b, jnp.full(slots, rank, jnp.int32), runs, (512, 1536))
    rows = jnp.asarray(chance.integers(0, slots + 1, tokens), jnp.int32)
    rows = rows.at[64:128].set(0)  # a tile without adapters
    wide = jnp.asarray(chance.normal(size=(tokens, 512 + slots * stack.parts * rank)), dtype)
    right = np.asarray(plain_adapter_product(wide, wide, rows, stack, gated=gated), np.float32)
    run = jax.jit(partial(adapter_product, gated=gated, interpret=INTERPRET))
    got = np.asarray(run(wide, wide, rows, stack), np.float32)
    check(got, right, dtype)
    if not gated:
        without = np.asarray(rows) == 0
        np.testing.assert_array_equal(got[without], np.asarray(wide, np.float32)[without, :512])
