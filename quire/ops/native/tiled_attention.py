"""Attention of tiles by the C++ kernel."""

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.pages import CodedPages, PagedContext


def tiled_attention(q: jax.Array, context: PagedContext) -> jax.Array:
    """As in attention/tiled_attention.py, for float32 on a CPU: decodes and prefills in one call. The library must have
    been loaded."""
    spec, pages, tiles, sinks = context.spec, context.pages, context.tiles, context.sinks
    name = "quire_coded_attention" if isinstance(pages, CodedPages) else "quire_tiled_attention"
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, q.dtype))  # type: ignore[no-untyped-call]
    out: jax.Array = call(
        q,
        *pages,
        context.page_table,
        tiles.slots,
        tiles.starts,
        tiles.lengths,
        tiles.offsets,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        scale=np.float32(spec.scale),
        softcap=np.float32(spec.softcap or 0.0),
        window=np.int64(spec.window or 0),
        chunk=np.int64(spec.chunk or 0),
    )
    return out
