"""Attention by the C++ kernels: heads into pages, and tiles over them."""

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.attention import step_attention
from quire.ops.attention.heads import Heads, Rotation
from quire.ops.attention.spread import run_of
from quire.ops.native.norms import NATIVE as NATIVE_NORMS
from quire.ops.pages import CodedPages, KVWriteTargets, PagedContext, Pages
from quire.ops.weights.rounded_rows import scaled


def place(heads: Heads, pages: Pages, targets: KVWriteTargets) -> tuple[jax.Array, Pages]:
    """As in quire.ops.attention.step_attention; codes of e4m3 are made by XLA."""
    heads = heads.with_norms_done(NATIVE_NORMS.rms)
    if isinstance(pages, CodedPages) and pages.k.dtype != jnp.int8:
        return step_attention.place(heads, pages, targets)
    return _place_heads(scaled(heads.qkv), heads.rotation, targets, pages)


def _place_heads(
    qkv: jax.Array, rotation: Rotation | None, targets: KVWriteTargets, pages: Pages
) -> tuple[jax.Array, Pages]:
    """Rotated queries [t, k, g, h] of qkv [t, k, g + 2, h], and the pages with keys and values in place: all float32,
    or pages of int8, for which queries and keys are `spread`.

    Tokens that go to the same place are padding, whose page is never read. The library must have been loaded.
    """
    tokens, heads, parts, size = qkv.shape
    none = jnp.zeros((tokens, 0), qkv.dtype)
    operands = [qkv, *(rotation or (none, none)), *targets, *pages]
    of_q = jax.ShapeDtypeStruct((tokens, heads, parts - 2, size), qkv.dtype)  # type: ignore[no-untyped-call]
    of_pages = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pages]  # type: ignore[no-untyped-call]
    first = len(operands) - len(pages)
    aliases = {first + index: 1 + index for index in range(len(pages))}
    is_coded = isinstance(pages, CodedPages)
    name = "quire_place_codes" if is_coded else "quire_place_heads"
    call = jax.ffi.ffi_call(name, [of_q, *of_pages], input_output_aliases=aliases)
    q, *written = call(*operands, run=np.int64(run_of(size))) if is_coded else call(*operands)
    return q, CodedPages(*written) if is_coded else (written[0], written[1])


def tiled_attention(q: jax.Array, context: PagedContext) -> jax.Array:
    """As in quire.ops.attention, for float32 on a CPU: decodes and prefills in one call. The library must have been
    loaded."""
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
