"""Packs of decodes that share positions: what each reads, and that no token has other bits for it."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.gpu.decode_attention import Tiling, decode_attention
from quire.ops.gpu.decode_list import MAX_PARTS, DecodeList, decode_list
from quire.ops.pages import SHARED_STEP, TILE, CodedPages, PagedContext, SharedPrefixes, Tiles, coded

SPEC = AttentionSpec(1, 4, 16, 0.25)
PART = 16
plain_attention = jax.jit(tiled_attention)
NUM_TILES = 4  # those that are not used are padding


@partial(jax.jit, static_argnums=1)
def listed(tiles: Tiles, pack_size: int) -> DecodeList:
    return decode_list(SPEC, tiles, PART, pack_size=pack_size)


def step_of(lengths: list[int], groups: list[tuple[list[int], int]]) -> Tiles:
    """Decodes that have so many positions before them, -1 for padding; the tokens of each group share so many."""
    groups = [*groups, *[([], 0)] * (NUM_TILES - len(groups))]
    tile_of, tokens = np.full(len(lengths), -1), np.full((NUM_TILES, TILE), -1)
    for tile, (members, _) in enumerate(groups):
        tile_of[members], tokens[tile, : len(members)] = tile, members
    shared = SharedPrefixes(
        *(jnp.asarray(one, jnp.int32) for one in (tile_of, tokens)),
        jnp.asarray([members[0] if members else 0 for members, _ in groups], jnp.int32),
        jnp.asarray([length for _, length in groups], jnp.int32),
    )
    return Tiles.single(jnp.arange(len(lengths), dtype=jnp.int32), jnp.asarray(lengths, jnp.int32), shared)


def positions_read(tiles: Tiles, pack_size: int) -> tuple[list[list[tuple[int, int]]], int]:
    """The parts that each token gets, in their order, as positions; and how many are read in all."""
    work = jax.tree.map(np.asarray, listed(tiles, pack_size))
    bounds = work.bounds.tolist()
    found: list[dict[int, tuple[int, int]]] = [{} for _ in range(len(tiles))]
    for number in range(bounds[-1]):
        entry = sum(bound <= number for bound in bounds)
        part = number - (bounds[entry - 1] if entry else 0)
        base, done = (0, 0) if work.bases is None else (int(work.bases[entry]), int(work.done[entry]))
        begin = (int(work.first[entry]) + part) * int(work.each[entry]) + base
        end = min(begin + int(work.each[entry]), int(work.ends[entry]))
        members = [entry] if work.members is None else [one for one in work.members[entry].tolist() if one >= 0]
        for token in members:
            assert done + part not in found[token]
            found[token][done + part] = begin, end
    assert [len(parts) for parts in found] == work.counts.tolist()
    assert all(sorted(parts) == list(range(len(parts))) for parts in found)
    assert max(map(len, found)) <= MAX_PARTS
    return [[parts[index] for index in sorted(parts)] for parts in found], bounds[-1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_token_has_the_same_parts_in_a_pack_and_alone(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(-1, 1200), min_size=8, max_size=8))
    rest, groups = [token for token, length in enumerate(lengths) if length >= SHARED_STEP], []
    while rest and len(groups) < NUM_TILES and data.draw(st.booleans()):
        members = data.draw(st.lists(st.sampled_from(rest), min_size=1, unique=True))
        rest = [token for token in rest if token not in members]
        most = min(lengths[token] for token in members) // SHARED_STEP
        groups.append((members, SHARED_STEP * data.draw(st.integers(1, most))))
    tiles = step_of(lengths, groups)
    alone, num_alone = positions_read(replace(tiles, shared=None), 4)
    packed, num_packed = positions_read(tiles, 4)
    assert packed == alone
    assert num_packed <= num_alone


def test_four_tokens_of_a_pack_read_shared_positions_once() -> None:
    tiles = step_of([200, 210, 220, 230, 129], [([0, 1, 2, 3], 192)])
    assert positions_read(replace(tiles, shared=None), 4)[1] == 13 + 14 + 14 + 15 + 9
    assert positions_read(tiles, 4)[1] == 12 + (1 + 2 + 2 + 3) + 9


def test_tokens_whose_parts_are_shorter_are_in_no_pack() -> None:
    """Parts of 16 positions are enough for 256 of them; longer contexts have parts of 32."""
    tiles = step_of([255, 256, 300, 250], [([0, 1, 2, 3], 192)])
    assert positions_read(tiles, 4)[1] == 6 + 16 + (9 - 6) + (10 - 6) + 16


@pytest.mark.parametrize("page_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("spec", [SPEC, AttentionSpec(2, 3, 16, 0.25, has_sinks=True), replace(SPEC, window=40)])
def test_a_token_has_the_same_bits_in_a_pack_and_alone(spec: AttentionSpec, page_dtype: str) -> None:
    page_size, table_size = 16, 20
    tiles = step_of([200, 64, 300, 199, -1, 255, 130], [([0, 2, 3, 5], 192), ([1, 6], 64)])
    rng = np.random.default_rng(0)
    table = 1 + np.arange(len(tiles) * table_size, dtype=np.int32).reshape(len(tiles), -1)
    table[[2, 3, 5], :12], table[6, :4] = table[0, :12], table[1, :4]
    shape = table.size + 1, page_size, spec.kv_heads, spec.head_dim
    pages: Any = tuple(jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(2))
    if page_dtype != "bfloat16":
        (k, of_keys), (v, of_values) = (coded(one, jnp.dtype(page_dtype)) for one in pages)
        pages = CodedPages(k, v, *(one.swapaxes(1, 2) for one in (of_keys, of_values)))
    q = jnp.asarray(rng.normal(size=(len(tiles), spec.kv_heads, spec.group, spec.head_dim)), jnp.bfloat16)
    sinks = jnp.ones((spec.kv_heads, spec.group), jnp.bfloat16) if spec.has_sinks else None
    how: Any = {"part": PART, "tiling": Tiling(16, 1, 1), "in_packs": True, "interpret": True}
    run, context = (
        jax.jit(partial(decode_attention, **how)),
        PagedContext(spec, pages, jnp.asarray(table), tiles, sinks),
    )
    alone, packed = (
        np.asarray(run(q, replace(context, tiles=each)).astype(jnp.float32))
        for each in (replace(tiles, shared=None), tiles)
    )
    assert np.array_equal(alone, packed)
    right = np.asarray(plain_attention(q, context).astype(jnp.float32))
    real = np.asarray(tiles.lengths) > 0
    assert np.linalg.norm(packed[real] - right[real]) <= 1e-2 * np.linalg.norm(right[real])
