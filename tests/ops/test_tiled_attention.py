"""Attention of tiles against dense attention in numpy, over random page tables, ragged tiles, windows and caps."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import PLAIN
from quire.ops.attention.tiled_attention import SPAN, tiled_attention
from quire.ops.gpu import prefill_attention as prefills
from quire.ops.gpu.decode_attention import Tiling, decode_attention
from quire.ops.gpu.kernels import GPU
from quire.ops.gpu.parts import combine_parts
from quire.ops.gpu.prefill_attention import prefill_attention
from quire.ops.gpu.tiles import Block, Softmax
from quire.ops.kernels import NATIVE, kernels_for
from quire.ops.pages import TILE, PagedContext, Tiles
from tests.ops.test_attention import dense, first_seen, sinks_of

Array = np.ndarray[Any, Any]
HEAD_DIM = 4
NUM_TILES = 3
TiledAttention = Callable[[jax.Array, PagedContext], jax.Array]


def interpreted(q: jax.Array, context: PagedContext) -> jax.Array:
    """The kernels of a GPU with small blocks and parts, so that short contexts have several."""
    single, count, out = context.tiles.num_single, len(context.tiles), None
    if single:
        tiling = Tiling(block=16, num_warps=4, num_stages=1)
        out = decode_attention(q, context.part(0, single), part=16, tiling=tiling, interpret=True)
        if single == count:
            return out
    tiling = prefills.Tiling(rows=32, block=32, num_warps=4, num_stages=1)
    return prefill_attention(q, context.part(single, count), out, tiling=tiling, part=64, interpret=True)


# Those in use that are different, with their names; there is no native one where nothing can build it.
IN_USE: dict[str, TiledAttention] = {
    "plain": tiled_attention,
    "gpu": interpreted,
    kernels_for("cpu", "float32").attend.__module__: kernels_for("cpu", "float32").attend,
}
implementations = pytest.mark.parametrize("implementation", IN_USE)


class Shape(NamedTuple):
    """Few, since each is compiled; between them every option alone, all together, and every kind of page size."""

    spec: AttentionSpec
    page_size: int
    num_single: int  # of NUM_TILES tiles
    width: int  # of the page table


def spec(kv_heads: int = 2, group: int = 2, **fields: Any) -> AttentionSpec:
    return AttentionSpec(kv_heads=kv_heads, group=group, head_dim=HEAD_DIM, scale=0.9, **fields)


SHAPES = (
    Shape(spec(1, 1), page_size=1, num_single=3, width=300),  # three spans, the last not full
    Shape(spec(2, 3), page_size=16, num_single=3, width=20),
    Shape(spec(window=5), page_size=16, num_single=2, width=20),
    Shape(spec(softcap=0.8), page_size=64, num_single=1, width=5),
    Shape(spec(window=1), page_size=7, num_single=0, width=45),  # a span that is no multiple of anything
    Shape(spec(window=150, softcap=0.8), page_size=3, num_single=1, width=100),  # a window longer than a span
    Shape(spec(window=9), page_size=SPAN + 32, num_single=2, width=2),  # a page longer than a span
    Shape(spec(1, 4), page_size=SPAN * 2, num_single=2, width=1),
    Shape(spec(2, 3, chunk=20), page_size=16, num_single=2, width=20),  # chunks end within tiles and within pages
    Shape(spec(2, 3, has_sinks=True), page_size=16, num_single=2, width=20),
    Shape(spec(window=9, softcap=0.8, has_sinks=True), page_size=16, num_single=1, width=20),
)


class Tile(NamedTuple):
    start: int
    length: int  # 0: padding


def tile_of(draw: st.DrawFn, positions: int, most: int) -> Tile:
    length = draw(st.integers(0, min(most, positions)))
    return Tile(draw(st.integers(0, positions - max(length, 1))), length)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, list[Tile]]:
    shape = draw(st.sampled_from(SHAPES))
    positions = shape.page_size * shape.width
    single = [tile_of(draw, positions, 1) for _ in range(shape.num_single)]
    single.sort(key=lambda tile: -tile.length)  # padding is behind the others
    return shape, single + [tile_of(draw, positions, TILE) for _ in range(NUM_TILES - shape.num_single)]


@cache
def compiled(implementation: str, spec: AttentionSpec) -> Any:
    return jax.jit(lambda q, *given: IN_USE[implementation](q, PagedContext(spec, *given)))


def tiles_of(tiles: list[Tile], num_single: int) -> Tiles:
    """Each of a slot of its own, and their tokens one after the other."""
    starts, lengths = np.asarray(tiles, np.int32).T
    offsets = np.cumsum(lengths, dtype=np.int32) - lengths
    return Tiles(jnp.arange(len(tiles), dtype=jnp.int32), *map(jnp.asarray, (starts, lengths, offsets)), num_single)


def run(implementation: str, shape: Shape, tiles: list[Tile], seed: int) -> tuple[Array, Array]:
    """The results for real tokens, and the right ones. Everything that no query sees is NaN: padding, the unused parts
    of pages, whole pages, the positions behind a window and those after a tile's last query."""
    spec, page_size, num_single, width = shape
    rng = np.random.default_rng(seed)
    num_pages = 1 + len(tiles) * width
    table = rng.permutation(np.arange(1, num_pages)).reshape(len(tiles), width).astype(np.int32)
    keys, values = rng.normal(size=(2, len(tiles), page_size * width, spec.kv_heads, HEAD_DIM)).astype(np.float32)
    k_pages = np.full((num_pages, page_size, spec.kv_heads, HEAD_DIM), np.nan, np.float32)
    v_pages = k_pages.copy()
    tokens = num_single + (len(tiles) - num_single) * TILE
    q = np.full((tokens, spec.kv_heads, spec.group, HEAD_DIM), np.nan, np.float32)
    expected = []
    token = 0
    for row, (start, length) in enumerate(tiles):
        first = first_seen(spec, start)
        for position in range(first, start + length if length else 0):
            where = table[row, position // page_size], position % page_size
            k_pages[where], v_pages[where] = keys[row, position], values[row, position]
        for position in range(start, start + length):
            q[token] = rng.normal(size=q.shape[1:])
            expected.append(dense(spec, q[token], keys[row], values[row], position))
            token += 1
        table[row, : first // page_size] = 0  # pages behind the window were given back
        table[row, -(-(start + length) // page_size) if length else 0 :] = 0  # entries beyond name the padding page
    out = compiled(implementation, spec)(q, (k_pages, v_pages), table, tiles_of(tiles, num_single), sinks_of(spec))
    return np.asarray(out)[:token], np.asarray(expected).reshape(-1, *q.shape[1:])


@implementations
@settings(max_examples=120)
@given(case=cases(), seed=st.integers(0, 99))
def test_attention_of_tiles_is_dense_attention(implementation: str, case: tuple[Shape, list[Tile]], seed: int) -> None:
    shape, tiles = case
    out, expected = run(implementation, shape, tiles, seed)
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-5)


@implementations
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_and_the_last_positions_of_a_table_are_read(implementation: str, shape: Shape) -> None:
    most = [1 if number < shape.num_single else TILE for number in range(NUM_TILES)]
    tiles = [Tile(0, most[0]), Tile(shape.page_size * shape.width - most[1], most[1]), Tile(0, 1)]
    out, expected = run(implementation, shape, tiles, seed=0)
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_comes_out_as_zeros_on_a_cpu(shape: Shape) -> None:
    """On a GPU it comes out as anything."""
    tokens = shape.num_single + (NUM_TILES - shape.num_single) * TILE
    q = np.full((tokens, shape.spec.kv_heads, shape.spec.group, HEAD_DIM), np.nan, np.float32)
    pages = np.full((2, shape.page_size, shape.spec.kv_heads, HEAD_DIM), np.nan, np.float32)
    for implementation in IN_USE.keys() - {"gpu"}:
        tiles = tiles_of([Tile(0, 0)] * NUM_TILES, shape.num_single)
        table = np.zeros((NUM_TILES, shape.width), np.int32)
        attend = compiled(implementation, shape.spec)
        assert not np.asarray(attend(q, (pages, pages), table, tiles, sinks_of(shape.spec))).any()


@implementations
@pytest.mark.parametrize(
    ("option", "reads_the_first_span"), [({}, True), ({"window": 4}, False), ({"chunk": SPAN}, False)], ids=str
)
def test_spans_before_every_window_are_not_read(
    implementation: str, option: dict[str, int], reads_the_first_span: bool
) -> None:
    shape = SHAPES[1]
    q, k_pages, v_pages = _arrays(shape)
    k_pages[1], v_pages[1] = np.inf, np.inf  # times a weight of 0 they would be NaN
    table = np.tile(np.arange(1, shape.width + 1, dtype=np.int32), (NUM_TILES, 1))
    tiles = tiles_of([Tile(2 * SPAN + 3, 1)] * NUM_TILES, NUM_TILES)
    out = compiled(implementation, spec(2, 3, **option))(q, (k_pages, v_pages), table, tiles)
    assert np.isnan(np.asarray(out)).any() == reads_the_first_span


@pytest.mark.parametrize("scale", [0.088, 0.125, 0.9])
def test_a_row_of_a_gpus_kernel_that_sees_none_of_a_part_weighs_nothing(scale: float) -> None:
    """Not even what a difference of two large products, fused into one operation, would leave."""
    ones = jnp.ones((16, HEAD_DIM))
    one_spec = AttentionSpec(1, 1, HEAD_DIM, scale)
    add = jax.jit(lambda softmax: softmax.add(one_spec, ones, Block(ones, ones), jnp.zeros((16, 16), bool)))
    assert not np.asarray(add(Softmax.begin(16, HEAD_DIM)).total).any()


def test_the_number_of_spans_read_is_found_at_run_time() -> None:
    shape = SHAPES[1]
    q, *pages = _arrays(shape)
    table, tiles = np.zeros((NUM_TILES, shape.width), np.int32), tiles_of([Tile(0, 0)] * NUM_TILES, NUM_TILES)
    traced = jax.make_jaxpr(tiled_attention)(q, PagedContext(shape.spec, tuple(pages), table, tiles))
    loops = [equation.primitive.name for equation in traced.eqns if equation.primitive.name in ("while", "scan")]
    assert loops == ["while"]  # a loop of a fixed number of turns would be a scan


def _arrays(shape: Shape) -> tuple[Array, Array, Array]:
    q = np.ones((NUM_TILES, shape.spec.kv_heads, shape.spec.group, HEAD_DIM), np.float32)
    pages = np.ones((shape.width + 1, shape.page_size, shape.spec.kv_heads, HEAD_DIM), np.float32)
    return q, pages, pages.copy()


@implementations
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_shows_in_its_own_sequence_alone(implementation: str, where: str) -> None:
    """So that a request whose values overflow is found, and its neighbours are spared."""
    shape = SHAPES[1]
    arrays = dict(zip("qkv", _arrays(shape), strict=True))
    table = np.asarray([[1, 2], [3, 4], [5, 6]], np.int32)
    arrays[where][1 if where == "q" else 3] = np.nan
    tiles = tiles_of([Tile(17, 1)] * NUM_TILES, NUM_TILES)
    attend = compiled(implementation, shape.spec)
    out = np.asarray(attend(arrays["q"], (arrays["k"], arrays["v"]), table, tiles))
    assert np.isnan(out).any(axis=(1, 2, 3)).tolist() == [False, True, False]
    assert np.allclose(out[[0, 2]], 1)


def test_the_smallest_numbers_are_not_zero_once_the_implementations_are_loaded() -> None:
    """A library that is linked for fast arithmetic can set the processor so, for everything else in the process."""
    assert IN_USE
    assert sys.float_info.min / 2 > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pages_of_a_smaller_type_are_summed_in_float32(dtype: str) -> None:
    """A thousand equal weights summed in bfloat16 would stop growing at 256."""
    shape = Shape(spec(1, 1), page_size=64, num_single=3, width=20)
    q, k_pages, v_pages = (jnp.asarray(array, dtype) for array in _arrays(shape))
    table = np.tile(np.arange(1, shape.width + 1, dtype=np.int32), (NUM_TILES, 1))
    tiles = tiles_of([Tile(999, 1), Tile(511, 1), Tile(2, 1)], NUM_TILES)
    implementation = kernels_for("cpu", dtype).attend
    out = jax.jit(implementation)(q, PagedContext(shape.spec, (k_pages, v_pages), table, tiles))
    assert out.dtype == dtype
    assert np.all(np.asarray(out, np.float32) == 1)


def test_every_platform_has_kernels_and_several_devices_have_those_that_xla_can_cut() -> None:
    assert kernels_for("cpu", "float32") in (NATIVE, PLAIN)
    assert kernels_for("cpu", "bfloat16") is PLAIN
    assert kernels_for("gpu", "bfloat16") == kernels_for("gpu", "float32")
    assert kernels_for("gpu", "bfloat16").attend is GPU.attend
    assert kernels_for("tpu", "bfloat16") is PLAIN


def test_long_contexts_of_few_programs_are_read_in_short_parts() -> None:
    """Those of many programs in longer ones, and all in whole blocks."""
    least = prefills._least_part
    assert least(jnp.int32(8), jnp.int32(8 * 300)) == prefills.LEAST_PART
    assert least(jnp.int32(80), jnp.int32(80 * 1300)) == 512
    assert least(jnp.int32(prefills.FEW_PROGRAMS), jnp.int32(8 * 300)) == prefills.PART
    assert least(jnp.int32(8), jnp.int32(8 * 100_000)) == prefills.PART
    assert all(int(least(jnp.int32(8), jnp.int32(8 * n))) % prefills.PART_STEP == 0 for n in range(0, 40_000, 777))


def test_a_short_prompt_behind_a_long_context_is_put_together_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given, page_size, positions = spec(2, 4), 16, 640
    rng = np.random.default_rng(5)
    table = 1 + rng.permutation(positions // page_size).astype(np.int32)[None]
    shape = positions // page_size + 1, page_size, given.kv_heads, HEAD_DIM
    pages = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    tiles = tiles_of([Tile(600, 9), Tile(0, 20)], 0)
    q = jnp.asarray(rng.normal(size=(29, given.kv_heads, given.group, HEAD_DIM)), jnp.float32)
    how: Any = {"tiling": prefills.Tiling(32, 32, 4, 1), "interpret": True}
    context = PagedContext(given, pages, jnp.tile(table, (2, 1)), tiles)
    cut: list[Any] = []

    def noted(out: jax.Array, counts: jax.Array, parts: Any, **named: Any) -> jax.Array:
        cut.append(counts)
        return combine_parts(out, counts, parts, **named)

    monkeypatch.setattr(prefills, "combine_parts", noted)
    out = prefill_attention(q, context, **how)
    assert cut[0].tolist() == [3] * 9 + [1] * 20
    expected = tiled_attention(q, context)
    np.testing.assert_allclose(out, expected, atol=1e-5)
