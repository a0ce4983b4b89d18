"""Attention of one layer of an 8B model on a GPU.

    python bench/gpu_kernels.py [--only decode shared prefill]

Attention runs over random page tables, many times after each other in one program, each on the queries that the last
one gave. Bytes are those of the keys and values that must be read; FLOP are those below the diagonal.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import Kernels
from quire.ops.gpu.fixed_order import attend as in_order
from quire.ops.kernels import kernels_for
from quire.ops.pages import TILE, PagedContext, Pages, Segments, SharedPrefixes, Tiles

SPEC = AttentionSpec(kv_heads=8, group=4, head_dim=128, scale=128**-0.5)
PAGE_SIZE, REPEATS = 32, 32


def repeated_s(attend: Callable[..., jax.Array], q: jax.Array, *given: Any) -> float:
    """Seconds of one call, of many that each take what the last one gave."""

    @jax.jit
    def many(q: jax.Array, *given: Any) -> jax.Array:
        return jax.lax.fori_loop(0, REPEATS, lambda _, q: attend(q, *given), q)

    many(q, *given).block_until_ready()
    begun = time.perf_counter()
    many(q, *given).block_until_ready()
    return (time.perf_counter() - begun) / REPEATS


def paged(lengths: np.ndarray[Any, Any]) -> tuple[Pages, jax.Array]:
    """Keys and values of sequences of these lengths in pages, and which page is where, [n, pages of the longest]."""
    counts = -(-lengths // PAGE_SIZE)
    free = np.random.default_rng(0).permutation(np.arange(1, counts.sum() + 1)).astype(np.int32)
    table = np.zeros((len(lengths), counts.max()), np.int32)
    for row, (count, end) in enumerate(zip(counts, counts.cumsum(), strict=True)):
        table[row, :count] = free[end - count : end]
    shape = (int(counts.sum()) + 1, PAGE_SIZE, SPEC.kv_heads, SPEC.head_dim)
    k, v = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in (1, 2))
    return (k, v), jnp.asarray(table)


def queries(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (*shape, SPEC.kv_heads, SPEC.group, SPEC.head_dim), jnp.bfloat16)


def decodes(kernels: Kernels) -> Iterator[str]:
    chance = np.random.default_rng(1)
    cases = {
        "256 rows x 256": np.full(256, 256),
        "256 rows x 200-1500, longest first": np.sort(chance.integers(200, 1500, 256))[::-1],
        "100 rows x 600-2000, longest first": np.sort(chance.integers(600, 2000, 100))[::-1],
        "16 rows x 8000": np.full(16, 8000),
        "8 rows x 300": np.full(8, 300),
    }
    for rows in (36, 49, 100, 200):
        drawn = np.clip(chance.lognormal(np.log(900), 0.9, rows), 50, 4500).astype(int)
        cases[f"{rows} rows, log-normal, longest first"] = np.sort(drawn)[::-1]
    for name, lengths in cases.items():
        pages, table = paged(lengths)
        rows = len(lengths)
        alone = Tiles.single(jnp.arange(rows), jnp.asarray(lengths - 1, jnp.int32))
        # As beside prefills, of which there are none: any number of rows up to 256 is computed by one program.
        room = jnp.full(257 - rows, -1)
        first = Tiles.single(
            jnp.concatenate([alone.slots, 0 * room]), jnp.concatenate([jnp.asarray(lengths - 1, jnp.int32), room])
        )
        beside = Tiles(first.slots, first.starts, first.lengths, first.offsets, num_single=256)
        read = int(lengths.sum()) * SPEC.kv_heads * SPEC.head_dim * 2 * 2
        for how, tiles, tokens in (("alone", alone, rows), ("beside prefills", beside, 257)):
            seconds = repeated_s(kernels.attend, queries(tokens), PagedContext(SPEC, pages, table, tiles))
            yield f"decode {how}, {name}: {seconds * 1e6:.0f} µs, {read / seconds / 1e12:.2f} TB/s"


def sharing(groups: list[int], shared: int, own: int) -> tuple[Pages, jax.Array, Tiles]:
    """Decodes of sequences in groups of these sizes, which share their first positions."""
    rows, count = sum(groups), shared // PAGE_SIZE
    leaders = np.repeat(np.cumsum([0, *groups[:-1]]), groups)
    pages, own_table = paged(np.where(np.arange(rows) == leaders, shared + own, own))
    table = np.zeros((rows, count + -(-own // PAGE_SIZE)), np.int32)
    table[:, count:] = np.asarray(own_table)[:, : table.shape[1] - count]
    for leader in set(leaders):
        table[leader] = own_table[leader]
        table[leaders == leader, :count] = table[leader, :count]
    members = [np.flatnonzero(leaders == one)[at : at + TILE] for one in set(leaders) for at in range(0, rows, TILE)]
    members = [one for one in members if len(one)]
    of_row, tokens = np.full(rows, -1, np.int32), np.full((len(members) + 16, TILE), -1, np.int32)
    slots, lengths = np.zeros((2, len(tokens)), np.int32)
    for tile, its_rows in enumerate(members):
        of_row[its_rows], tokens[tile, : len(its_rows)] = tile, its_rows
        slots[tile], lengths[tile] = its_rows[0], shared
    prefixes = SharedPrefixes(*map(jnp.asarray, (of_row, tokens, slots, lengths)))
    tiles = Tiles.single(jnp.arange(rows), jnp.full(rows, shared + own - 1, jnp.int32), prefixes)
    return pages, jnp.asarray(table), tiles


SHARING = {
    "256 rows sharing 4096, 64 own": ([256], 4096, 64),
    "64 rows in 2 groups sharing 4096, 64 own": ([32, 32], 4096, 64),
    "256 rows in 16 groups sharing 1024, 512 own": ([16] * 16, 1024, 512),
}


def shared_prefixes(kernels: Kernels) -> Iterator[str]:
    """Bytes are those of all contexts, whether they are read once or for each row. The last ones show what the kernels
    cost where nothing is shared. In packs: as a reproducible engine does."""
    for name, (groups, shared, own) in SHARING.items():
        pages, table, tiles = sharing(groups, shared, own)
        read = len(tiles) * (shared + own) * SPEC.kv_heads * SPEC.head_dim * 2 * 2
        alone = replace(tiles, shared=None)
        ways = ("alone", kernels.attend, alone), ("together", kernels.attend, tiles), ("in packs", in_order, tiles)
        for how, attend, its_tiles in ways:
            seconds = repeated_s(attend, queries(len(tiles)), PagedContext(SPEC, pages, table, its_tiles))
            yield f"decode {how}, {name}: {seconds * 1e6:.0f} µs, {read / seconds / 1e12:.2f} TB/s"
    pages, table, tiles = sharing([256], 64, 960)
    shared = tiles.shared
    assert shared is not None
    nothing = SharedPrefixes(
        *(jnp.full_like(one, -1) for one in shared[:2]), shared.slots, jnp.zeros_like(shared.lengths)
    )
    ways = ("without room", kernels.attend, None), ("with room", kernels.attend, nothing)
    for how, attend, its_shared in (*ways, ("with room for packs", in_order, nothing)):
        context = PagedContext(SPEC, pages, table, replace(tiles, shared=its_shared))
        seconds = repeated_s(attend, queries(len(tiles)), context)
        yield f"decode {how} for shared positions, 256 rows x 1024: {seconds * 1e6:.1f} µs"


def prefills(kernels: Kernels) -> Iterator[str]:
    for count, length in ((4, 2048), (1, 8192)):
        lengths = np.full(count, length)
        pages, table = paged(lengths)
        each = length // TILE
        tiles = Tiles(
            jnp.repeat(jnp.arange(count), each),
            jnp.tile(jnp.arange(each) * TILE, count),
            jnp.full(count * each, TILE),
            jnp.arange(count * each) * TILE,
            num_single=0,
        )
        flop = count * 4 * length * length / 2 * SPEC.kv_heads * SPEC.group * SPEC.head_dim
        seconds = repeated_s(kernels.attend, queries(count * length), PagedContext(SPEC, pages, table, tiles))
        yield f"prefill, {count} x {length}, ours: {seconds * 1e6:.0f} µs, {flop / seconds / 1e12:.0f} TFLOP/s"
        if count > kernels.max_fresh_sequences:
            continue
        most = 1 if count == 1 else kernels.max_fresh_sequences
        offsets = np.full(most, -1, np.int32)
        sizes = offsets.copy()
        offsets[:count], sizes[:count] = np.arange(count) * length, length
        shape = (count * length, SPEC.kv_heads, SPEC.head_dim)
        fresh = [jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in (1, 2)]
        segments = Segments(jnp.asarray(offsets), jnp.asarray(sizes))

        def attend_fresh(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
            out = kernels.attend_fresh(SPEC, q, k, v, segments)
            assert out is not None
            return out

        seconds = repeated_s(attend_fresh, queries(count * length), *fresh, segments)
        yield f"prefill, {count} x {length}, new sequences: {seconds * 1e6:.0f} µs, {flop / seconds / 1e12:.0f} TFLOP/s"


KINDS = {"decode": decodes, "shared": shared_prefixes, "prefill": prefills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=[*KINDS])
    given = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"these kernels are for a GPU; JAX has a {jax.default_backend()}")
    kernels = kernels_for("gpu", "bfloat16")
    for kind in given.only:
        for line in KINDS[kind](kernels):
            print(line, flush=True)


if __name__ == "__main__":
    main()
