"""Keys and values in pages, and the tokens of a step that read and write them."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.spread import spread
from quire.ops.weights.rounded_rows import LEAST_SCALE

TILE = 32  # tokens of a prefill that read the cache together, at most
SHARED_STEP = 64  # shared prefixes are multiples of it, in positions: it is the largest block of a kernel

# By the dtype of pages that have scales.
LARGEST_CODE = {"float8_e4m3fn": 448.0, "int8": 127.0}
ALL_BUT_SIGN = 0x7FFFFFFF
# Those whose keys are `spread`: floats round small numbers as finely as large ones, and gain less by it.
SPREAD = ("int8",)


class CodedPages(NamedTuple):
    """Keys and values of eight bits. Each token has a scale for each head, so that writing it changes no other.

    Where the dtype `has_spread_keys`, keys are stored spread, and the queries that read them are spread as well.

    The scales of a head in a page are contiguous, so a kernel that reads a head reads few more bytes for them.
    """

    k: Any  # [num_pages, page_size, k, h]: e4m3 or int8
    v: Any
    k_scales: Any  # bfloat16 [num_pages, k, page_size]
    v_scales: Any


Pages = tuple[jax.Array, jax.Array] | CodedPages  # keys and values, [num_pages, page_size, k, h] each, and scales


def is_coded(dtype: Any) -> bool:
    """True if pages of this dtype have scales."""
    return str(dtype) in LARGEST_CODE


def has_spread_keys(dtype: Any) -> bool:
    """True if pages of this dtype keep keys `spread`; queries that read them are spread as well."""
    return str(dtype) in SPREAD


def spread_for_cache(q: jax.Array, k: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Finished queries and keys, `spread` where pages of this dtype keep keys spread."""
    return (spread(q).astype(q.dtype), spread(k)) if has_spread_keys(dtype) else (q, k)


def coded(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Codes of heads [..., h], and their scales [...]; within kernels, too."""
    numbers, most = x.astype(jnp.float32), LARGEST_CODE[str(dtype)]
    # As integers absolute values have the same order, and NaN is the largest, which a maximum of floats may drop.
    bits = jax.lax.bitcast_convert_type(numbers, jnp.int32) & ALL_BUT_SIGN
    reach = jax.lax.bitcast_convert_type(bits.max(axis=-1), jnp.float32)
    is_number = reach - reach  # 0, or NaN, which int8 cannot be
    scales = (jnp.maximum(reach / most, LEAST_SCALE) + is_number).astype(jnp.bfloat16)
    numbers = jnp.clip(numbers / scales.astype(jnp.float32)[..., None], -most, most)
    if dtype == jnp.int8:
        numbers = jnp.floor(numbers + 0.5)  # a Triton kernel has no `round`
    return numbers.astype(dtype), scales


def widened(codes: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """The numbers that codes [..., h] with scales [...] stand for."""
    return (codes.astype(jnp.float32) * scales.astype(jnp.float32)[..., None]).astype(dtype)


class KVWriteTargets(NamedTuple):
    """The places of each token's keys and values. Padding has page 0, which is never read."""

    pages: jax.Array  # [t]
    offsets: jax.Array  # [t], within the page


class SharedPrefixes(NamedTuple):
    """Decodes whose page tables begin with the same pages, in tiles [m] of up to TILE that can read those together.

    They only make some kernels faster: the results are the same without them.
    """

    tile_of: jax.Array  # [num_single]: the tile of each single token; -1 for none
    tokens: jax.Array  # [m, TILE]: the single tokens of each tile; -1 for none
    slots: jax.Array  # [m]: a slot whose page table begins with the shared pages
    lengths: (
        jax.Array
    )  # [m]: positions shared, a multiple of SHARED_STEP, all of them before those of its tokens; 0: padding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """The queries of a step, cut into runs of consecutive positions of one sequence; [n] each.

    The first `num_single` tiles have one token at most, and tile i of them is token i: decodes. The others, of
    prefills, have TILE tokens at most. A tile of length 0 is padding. Tiles cover the tokens of a step from the first
    one on without gaps; the tokens behind them are padding, and attention may return anything for those.
    """

    slots: jax.Array
    starts: jax.Array  # position of the first token
    lengths: jax.Array
    offsets: jax.Array  # of the first token among the tokens of the step
    num_single: int = field(metadata={"static": True})
    shared: SharedPrefixes | None = None  # of the single tokens

    @classmethod
    def single(cls, slots: jax.Array, positions: jax.Array, shared: SharedPrefixes | None = None) -> "Tiles":
        """One token of each of these slots; a negative position is padding."""
        count = len(slots)
        lengths = (positions >= 0).astype(jnp.int32)
        return cls(slots, jnp.maximum(positions, 0), lengths, jnp.arange(count, dtype=jnp.int32), count, shared)

    def __len__(self) -> int:
        return len(self.slots)

    def part(self, first: int, end: int) -> "Tiles":
        """Some of the tiles; with shared prefixes where these are all the single tokens."""
        is_all_single = first == 0 and end == self.num_single
        return Tiles(
            self.slots[first:end],
            self.starts[first:end],
            self.lengths[first:end],
            self.offsets[first:end],
            num_single=max(0, min(end, self.num_single) - first),
            shared=self.shared if is_all_single else None,
        )


class Segments(NamedTuple):
    """Sequences that are computed from their first position on, [m] each; length -1 and offset -1 for padding."""

    offsets: jax.Array  # of the first token among the tokens of the step
    lengths: jax.Array


class PageAccess(NamedTuple):
    """The places that a step's tokens read and write in the pages of one group.

    Position p of slot s is at offset `p % page_size` of page `page_table[s, p // page_size]`. Entries of the table
    beyond a context or behind a window may name any page, and positions that no token sees may hold anything, NaN
    included.
    """

    targets: KVWriteTargets
    page_table: jax.Array  # [slots + 1, max_pages]
    tiles: Tiles
    segments: Segments | None = None  # where the step consists of new sequences alone


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedContext:
    """The keys and values that the queries of a step read in one layer: all that attention needs beside the queries."""

    spec: AttentionSpec = field(metadata={"static": True})
    pages: Pages
    page_table: jax.Array  # [slots + 1, max_pages]
    tiles: Tiles
    sinks: jax.Array | None = None  # [k, g], where the spec `has_sinks`

    def part(self, first: int, end: int) -> "PagedContext":
        """Of some of the tiles."""
        return replace(self, tiles=self.tiles.part(first, end))


def write_targets(page_table: jax.Array, slots: jax.Array, positions: jax.Array, page_size: int) -> KVWriteTargets:
    """The write targets of tokens [t] at these positions; negative ones are padding."""
    at = jnp.maximum(positions, 0)
    pages = jnp.where(positions < 0, 0, page_table[slots, at // page_size])
    return KVWriteTargets(pages, at % page_size)


def written(pages: Pages, k: jax.Array, v: jax.Array, targets: KVWriteTargets) -> Pages:
    """The pages with keys and values [t, k, h] in their places."""
    at = targets.pages, targets.offsets
    if not isinstance(pages, CodedPages):
        k_pages, v_pages = pages
        return k_pages.at[at].set(k.astype(k_pages.dtype)), v_pages.at[at].set(v.astype(v_pages.dtype))
    arrays = []
    for codes, scales, new in ((pages.k, pages.k_scales, k), (pages.v, pages.v_scales, v)):
        new_codes, new_scales = coded(new, codes.dtype)
        arrays.append((codes.at[at].set(new_codes), scales.at[at[0], :, at[1]].set(new_scales)))
    (k_codes, k_scales), (v_codes, v_scales) = arrays
    return CodedPages(k_codes, v_codes, k_scales, v_scales)


def put(pages: jax.Array, new: jax.Array, targets: KVWriteTargets) -> jax.Array:
    """The pages [p, page_size, ...] with rows [t, ...] in their places. Padding, which has page 0, is dropped: no two
    rows then have the same place, and a GPU needs no atomic operation for each number, which for two bytes is a loop.
    """
    there = jnp.where(targets.pages > 0, targets.pages, len(pages))
    return pages.at[there, targets.offsets].set(new.astype(pages.dtype), mode="drop", unique_indices=True)


def read_tokens(pages: Pages, at: KVWriteTargets, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Keys and values [t, k, h] of tokens in these places."""
    k, v = pages[0][at.pages, at.offsets], pages[1][at.pages, at.offsets]
    if not isinstance(pages, CodedPages):
        return k, v
    k_scales, v_scales = (scales[at.pages, :, at.offsets] for scales in (pages.k_scales, pages.v_scales))
    return widened(k, k_scales, dtype), widened(v, v_scales, dtype)


def read_pages(pages: Pages, at: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Keys and values [..., page_size, k, h] of whole pages [...]."""
    if not isinstance(pages, CodedPages):
        return pages[0][at], pages[1][at]
    k_scales, v_scales = (jnp.swapaxes(scales[at], -1, -2) for scales in (pages.k_scales, pages.v_scales))
    return widened(pages.k[at], k_scales, dtype), widened(pages.v[at], v_scales, dtype)
