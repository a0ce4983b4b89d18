"""The list of work of decodes: parts of contexts, which programs take one after the other.

Positions that tokens share are read before, by another kernel, or by packs. A product has more rows than a head has
queries; the others are padding. A pack is a few tokens that share positions and fill these rows. Its parts are those
that each of its tokens has in any case, and the same kernel reads them: a token has the same bits in a pack and alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.shared_attention import SharedParts
from quire.ops.gpu.tiles import power_of_two
from quire.ops.pages import TILE, SharedPrefixes, Tiles

PART = 256  # positions
MAX_PARTS = 16  # of one context: longer parts follow from it


class DecodeList(NamedTuple):
    """Entries [n], each with parts of one context: those of packs, if there are any, then those of the tokens [t]."""

    slots: jax.Array
    ends: jax.Array  # position after the last
    each: jax.Array  # positions of a part
    first: jax.Array  # part
    bounds: jax.Array  # parts of this entry and of all before it
    bases: jax.Array | None  # position that parts are counted from; None: the first
    done: jax.Array | None  # parts of a token that others read; None: none
    members: jax.Array | None  # [n, s]: the tokens of an entry, -1 for none; None: that of its place
    num_packs: int
    counts: jax.Array  # [t]: parts of each token, those that others read included

    def of_entries(self) -> list[jax.Array]:
        return [self.slots, self.ends, self.each, self.first, self.bounds]

    def of_shared(self) -> list[jax.Array]:
        return [array for array in (self.bases, self.done, self.members) if array is not None]


class SharedRowPacks(NamedTuple):
    """[n] packs of up to s tokens each, of t single tokens."""

    members: jax.Array  # [n, s]; -1 for none
    slots: jax.Array  # whose page table begins with the shared pages
    ends: jax.Array  # positions that are read together: whole parts
    each: jax.Array  # positions of a part
    bases: jax.Array  # [t]: positions that the pack of a token reads


def decode_list(
    spec: AttentionSpec, tiles: Tiles, part: int, shared: SharedParts | None = None, pack_size: int = 1
) -> DecodeList:
    """The parts of the tokens of `tiles`, one of each, behind those that are `shared`, or in packs of this size."""
    is_real = tiles.lengths > 0
    ends = jnp.where(is_real, tiles.starts + 1, 0)
    begins = jnp.where(is_real, spec.first_seen(tiles.starts), 0)
    bases = jnp.zeros_like(ends) if shared is None else jnp.where(is_real, shared.ends, 0)
    each = jnp.maximum(part * -(-(ends - bases) // (part * MAX_PARTS)), 1)
    done, packs = None if shared is None else shared.counts, None
    if pack_size > 1 and tiles.shared is not None:
        packs = packs_of(tiles.shared, each, pack_size)
        bases = jnp.where(is_real, packs.bases, 0)
        done = bases // each
    first = jnp.maximum(begins - bases, 0) // each
    numbers = -(-(ends - bases) // each) - first
    entries = [tiles.slots, ends, each, first, numbers, *([] if done is None else [bases, done])]
    if packs is not None:
        nothing = jnp.zeros_like(packs.ends)
        of_packs = packs.slots, packs.ends, packs.each, nothing, packs.ends // packs.each, nothing, nothing
        entries = [jnp.concatenate(both) for both in zip(of_packs, entries, strict=True)]
    padding = power_of_two(len(entries[0])) - len(entries[0])
    slots, all_ends, all_each, firsts, all_numbers, *others = (jnp.pad(field, (0, padding)) for field in entries)
    return DecodeList(
        slots,
        all_ends,
        all_each,
        firsts,
        bounds=jnp.cumsum(all_numbers),
        bases=others[0] if others else None,
        done=others[1] if others else None,
        members=None if packs is None else _members(packs, len(ends), padding),
        num_packs=0 if packs is None else len(packs.ends),
        counts=numbers if done is None else jnp.where(is_real, numbers + done, 0),
    )


def packs_of(shared: SharedPrefixes, each: jax.Array, size: int) -> SharedRowPacks:
    """`each` [t]: positions of the parts of each token. Tokens with shorter parts than others of their tile are in no
    pack: they read all positions alone. TILE is a multiple of `size`."""
    of_tokens = jnp.where(shared.tokens >= 0, each[shared.tokens], 1)  # [m, TILE]
    of_tiles = of_tokens.max(axis=1)
    ends = shared.lengths // of_tiles * of_tiles
    members = jnp.where(of_tokens == of_tiles[:, None], shared.tokens, -1).reshape(-1, size)
    slots, pack_ends, of_packs = (jnp.repeat(of_tile, TILE // size) for of_tile in (shared.slots, ends, of_tiles))
    tile = jnp.maximum(shared.tile_of, 0)
    is_member = (shared.tile_of >= 0) & (each == of_tiles[tile])
    is_used = members.max(axis=1) >= 0
    return SharedRowPacks(
        members, slots, jnp.where(is_used, pack_ends, 0), of_packs, jnp.where(is_member, ends[tile], 0)
    )


def _members(packs: SharedRowPacks, num_tokens: int, padding: int) -> jax.Array:
    """The tokens of all entries."""
    alone = jnp.arange(num_tokens + padding, dtype=jnp.int32)[:, None]
    alone = jnp.pad(alone, ((0, 0), (0, packs.members.shape[1] - 1)), constant_values=-1)
    return jnp.concatenate([packs.members, alone])
