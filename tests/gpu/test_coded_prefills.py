"""Prefills over pages of eight bits by the kernel for Hopper GPUs, against the plain ones; `tests/ops` has its list
of work.

Every page that is not read holds NaN, and so does the unused part of those that are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.gpu import kernels as gpu_kernels
from quire.ops.gpu.hopper.prefill_items import fits
from quire.ops.pages import TILE, PagedContext, Pages, Tiles
from tests.gpu.hopper import MARKS
from tests.gpu.test_kernels import WIDTH, check, in_codes, paged

pytestmark = MARKS
SPEC = AttentionSpec(8, 4, 128, 0.088)
# Starts and lengths of tiles: whole and not, at the edges of blocks and of pages, and one token alone.
PLACES = [(0, 32), (0, 1), (97, 31), (96, 32), (127, 2), (128, 16), (128, 17), (300, 32), (511, 15), (608, 32), (5, 0)]


def attended(spec: AttentionSpec) -> Any:
    from quire.ops.gpu.hopper.coded_prefills import coded_prefills

    return jax.jit(lambda q, *given: coded_prefills(q, PagedContext(spec, *given)))


def assert_right(spec: AttentionSpec, q: jax.Array, pages: Pages, table: jax.Array, tiles: Tiles) -> None:
    """Token by token."""
    expected = np.asarray(jax.jit(tiled_attention)(q, PagedContext(spec, pages, table, tiles)), np.float32)
    got = np.asarray(attended(spec)(q, pages, table, tiles), np.float32)
    for token in range(int(tiles.lengths.sum())):
        check(got[token], expected[token], "bfloat16")


@pytest.mark.parametrize(
    ("group", "page_size", "cache_dtype"),
    [
        *((4, size, "float8_e4m3fn") for size in (8, 16, 32, 64)),
        *((group, 32, "float8_e4m3fn") for group in (1, 2, 3, 5, 7, 8)),
        (4, 16, "int8"),
        (8, 32, "int8"),
    ],
)
def test_prefills_read_their_contexts(group: int, page_size: int, cache_dtype: str) -> None:
    spec = AttentionSpec(3, group, 128, 0.1)
    longest = page_size * WIDTH
    places = [(min(start, longest - length), length) for start, length in PLACES]
    q, pages, table, tiles = paged(spec, page_size, "bfloat16", places, num_single=0)
    assert_right(spec, q, in_codes(pages, cache_dtype), table, tiles)


def test_programs_share_many_items() -> None:
    chance = np.random.default_rng(1)
    places = [(int(start), int(chance.integers(1, 33))) for start in chance.integers(0, 600, 90)]
    q, pages, table, tiles = paged(SPEC, 32, "bfloat16", places, num_single=0)
    assert_right(SPEC, q, in_codes(pages, "float8_e4m3fn"), table, tiles)


def test_a_long_context_is_read() -> None:
    places = [(8100, 32), (3000, 7)]
    q, pages, table, tiles = paged(SPEC, 32, "bfloat16", places, num_single=0, width=260)
    assert_right(SPEC, q, in_codes(pages, "float8_e4m3fn"), table, tiles)


def test_nothing_to_read() -> None:
    q, pages, table, tiles = paged(SPEC, 32, "bfloat16", [(0, 0)] * 20, num_single=0)
    jax.block_until_ready(attended(SPEC)(q, in_codes(pages, "float8_e4m3fn"), table, tiles))


def test_prefills_follow_decodes_and_padding_for_more() -> None:
    decodes, room = [(position, 1) for position in range(10, 440, 10)], 64
    places = [*decodes, (100, 20), *[(64, 32)] * 30]
    q, pages, table, tiles = paged(SPEC, 32, "bfloat16", places, num_single=0)
    fields = tiles.slots, tiles.starts, tiles.lengths, tiles.offsets
    padding = jnp.zeros(room - len(decodes), jnp.int32)
    together = [jnp.concatenate([one[: len(decodes)], padding, one[len(decodes) :]]) for one in fields]
    tiles, codes = Tiles(*together, num_single=room), in_codes(pages, "float8_e4m3fn")
    context = PagedContext(SPEC, codes, table, tiles)
    assert fits(q, context)
    expected = np.asarray(jax.jit(tiled_attention)(q, context), np.float32)
    got = np.asarray(gpu_kernels.attend_on_hopper(q, context), np.float32)
    for token in range(int(tiles.lengths.sum())):
        check(got[token], expected[token], "bfloat16")


def test_values_may_be_of_very_different_sizes() -> None:
    q, (k, v), table, tiles = paged(SPEC, 32, "bfloat16", [(100, 32), (300, 9)], num_single=0)
    sizes = 10.0 ** jax.random.uniform(jax.random.key(3), (*v.shape[:2], 1, 1), minval=-6, maxval=6)
    assert_right(SPEC, q, in_codes((k, (v * sizes).astype(v.dtype)), "float8_e4m3fn"), table, tiles)


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e3, 1e30])
def test_queries_may_be_of_any_size(factor: float) -> None:
    q, (k, v), table, tiles = paged(SPEC, 32, "bfloat16", [(100, 32), (300, 9)], num_single=0)
    codes = in_codes(((k / factor).astype(k.dtype), v), "float8_e4m3fn")
    assert_right(SPEC, (q * factor).astype(q.dtype), codes, table, tiles)


def test_queries_and_keys_may_be_zero() -> None:
    q, (k, v), table, tiles = paged(SPEC, 32, "bfloat16", [(100, 32), (300, 9)], num_single=0)
    codes = in_codes((jnp.where(jnp.isnan(k), k, 0), v), "float8_e4m3fn")
    assert_right(SPEC, q * 0, codes, table, tiles)
    assert_right(SPEC, q, codes, table, tiles)


def whole_tiles(count: int) -> tuple[jax.Array, Pages, jax.Array, Tiles]:
    """Queries, pages of codes, a page table, and tiles behind contexts of many lengths."""
    starts = np.random.default_rng(count).integers(0, 600, count)
    q, pages, table, tiles = paged(SPEC, 32, "bfloat16", [(int(start), TILE) for start in starts], num_single=0)
    return q, in_codes(pages, "float8_e4m3fn"), table, tiles


def test_a_token_does_not_depend_on_others() -> None:
    q, codes, table, tiles = whole_tiles(40)
    run = attended(SPEC)
    together = np.asarray(run(q, codes, table, tiles), np.float32)
    beside = np.asarray(run(q.at[1::2].set(jnp.nan), codes, table, tiles), np.float32)
    np.testing.assert_array_equal(beside[::2], together[::2])
    assert np.isnan(beside[1::2]).all()
    for index in (0, 7, 39):
        one = tiles.part(index, index + 1)
        alone = np.asarray(run(q, codes, table, one), np.float32)
        own = slice(index * TILE, (index + 1) * TILE)
        np.testing.assert_array_equal(alone[own], together[own])


def test_the_same_bits_every_time() -> None:
    q, codes, table, tiles = whole_tiles(64)
    run = attended(SPEC)
    first = np.asarray(run(q, codes, table, tiles), np.float32)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(run(q, codes, table, tiles), np.float32), first)
