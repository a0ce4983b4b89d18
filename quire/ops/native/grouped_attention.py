"""Grouped attention by the C++ kernel."""

import jax
import numpy as np

from quire.ops.attention_spec import AttentionSpec
from quire.ops.grouped_attention import Groups


def grouped_attention(
    spec: AttentionSpec, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, groups: Groups
) -> jax.Array:
    """As in quire.ops.grouped_attention, for float32 on a CPU. The library must have been loaded."""
    call = jax.ffi.ffi_call("quire_grouped_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))  # type: ignore[no-untyped-call]
    out: jax.Array = call(
        q,
        k_pages,
        v_pages,
        groups.page_table,
        groups.starts,
        groups.lengths,
        scale=np.float32(spec.scale),
        softcap=np.float32(spec.softcap or 0.0),
        window=np.int64(spec.window or 0),
    )
    return out
