"""Attention on Hopper GPUs: over pages of eight bits by kernels of their own, where they are for them, and else as on
other GPUs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.decode_attention import decode_parts
from quire.ops.gpu.decode_list import MAX_PARTS
from quire.ops.gpu.hopper.decode_items import part_of
from quire.ops.gpu.hopper.prefill_items import fits
from quire.ops.gpu.parts import Parts, combine_parts
from quire.ops.gpu.rounded_parts import round_parts
from quire.ops.pages import CodedPages, Pages, Tiles
from quire.ops.weights.rounded_rows import RoundedRows


def coded_decode_attention(spec: AttentionSpec, q: jax.Array, pages: Pages, *others: Any) -> jax.Array:
    """As `decode_attention`."""
    return combine_parts(*coded_decode_parts(spec, q, pages, *others))


def rounded_decode_attention(
    parts: Callable[..., tuple[jax.Array, jax.Array, Parts]], spec: AttentionSpec, q: jax.Array, *others: Any
) -> RoundedRows:
    """By the kernel that gives `parts`, for tokens that are all single, as rows."""
    return round_parts(*parts(spec, q, *others), jnp.float8_e4m3fn)


def coded_prefill_attention(
    spec: AttentionSpec, q: jax.Array, pages: Pages, page_table: jax.Array, prefills: Tiles
) -> jax.Array | None:
    """Attention of the tokens of these tiles, [t, k, g, h]; the others may be anything. None: there is no kernel."""
    if not fits(spec, q, pages):
        return None
    from quire.ops.gpu.hopper.coded_prefills import coded_prefills

    assert isinstance(pages, CodedPages)
    return coded_prefills(spec, q, pages, page_table, prefills)


def with_decodes(prefills: jax.Array, decodes: jax.Array, tiles: Tiles) -> jax.Array:
    """`prefills` [t, k, g, h], with the results of the first tokens, which are decodes of these tiles."""
    places = jnp.where(tiles.lengths > 0, tiles.offsets, len(prefills))
    return prefills.at[places].set(decodes[: len(tiles)], mode="drop", unique_indices=True)


def coded_decode_parts(
    spec: AttentionSpec,
    q: jax.Array,
    pages: Pages,
    page_table: jax.Array,
    tiles: Tiles,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Parts]:
    """As `decode_parts`."""
    part = part_of(spec, q, pages, len(tiles)) if tiles.shared is None else None
    if part is None:
        return decode_parts(spec, q, pages, page_table, tiles, sinks)
    from quire.ops.gpu.hopper.coded_decodes import coded_decodes  # loading Mosaic takes a third of a second

    assert isinstance(pages, CodedPages)
    return coded_decodes(spec, q, pages, page_table, tiles, part, MAX_PARTS)
