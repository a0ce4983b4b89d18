"""Attention on Hopper GPUs: over pages of eight bits by kernels of their own, where they are for them, and else as on
other GPUs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from quire.ops.gpu.decode_attention import decode_parts
from quire.ops.gpu.decode_list import MAX_PARTS
from quire.ops.gpu.hopper.decode_items import part_of
from quire.ops.gpu.hopper.prefill_items import fits
from quire.ops.gpu.parts import Parts, combine_parts
from quire.ops.gpu.rounded_parts import round_parts
from quire.ops.pages import PagedContext, Tiles
from quire.ops.weights.rounded_rows import RoundedRows


def coded_decode_attention(q: jax.Array, context: PagedContext) -> jax.Array:
    """As `decode_attention`."""
    return combine_parts(*coded_decode_parts(q, context))


def rounded_decode_attention(
    parts: Callable[..., tuple[jax.Array, jax.Array, Parts]], q: jax.Array, context: PagedContext
) -> RoundedRows:
    """By the kernel that gives `parts`, for tokens that are all single, as rows."""
    return round_parts(*parts(q, context), jnp.float8_e4m3fn)


def coded_prefill_attention(q: jax.Array, context: PagedContext) -> jax.Array | None:
    """Attention of the tokens of these tiles, [t, k, g, h]; the others may be anything. None: there is no kernel."""
    if not fits(q, context):
        return None
    from quire.ops.gpu.hopper.coded_prefills import coded_prefills

    return coded_prefills(q, context)


def with_decodes(prefills: jax.Array, decodes: jax.Array, tiles: Tiles) -> jax.Array:
    """`prefills` [t, k, g, h], with the results of the first tokens, which are decodes of these tiles."""
    places = jnp.where(tiles.lengths > 0, tiles.offsets, len(prefills))
    return prefills.at[places].set(decodes[: len(tiles)], mode="drop", unique_indices=True)


def coded_decode_parts(q: jax.Array, context: PagedContext) -> tuple[jax.Array, jax.Array, Parts]:
    """As `decode_parts`."""
    part = part_of(q, context) if context.tiles.shared is None else None
    if part is None:
        return decode_parts(q, context)
    from quire.ops.gpu.hopper.coded_decodes import coded_decodes  # loading Mosaic takes a third of a second

    return coded_decodes(q, context, part, MAX_PARTS)
