"""Attention as models call it: which implementation runs, and where the keys and values are."""

from collections.abc import Callable
from typing import Any

import jax

from quire.ops import attention_reference
from quire.ops.attention_spec import AttentionSpec
from quire.ops.grouped_attention import Groups, grouped_attention
from quire.ops.native import grouped_attention as native
from quire.ops.native import library
from quire.ops.pages import PagedBatch, write_pages

# attend(spec, q [t, k, g, h], k [t, k, h], v [t, k, h], state) -> (out [t, k, g, h], state)
Attend = Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
PagedAttention = Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array, PagedBatch], jax.Array]
GroupedAttention = Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array, Groups], jax.Array]

# By the platform a JAX device names.
IMPLEMENTATIONS: dict[str, PagedAttention] = {
    "cpu": attention_reference.paged_attention,
    "gpu": attention_reference.paged_attention,
    "tpu": attention_reference.paged_attention,
}


def paged_attend(batch: PagedBatch, platform: str) -> Attend:
    """Attention over pages; the state of a layer is its pair of page arrays, which the step's tokens are written to."""
    paged_attention = IMPLEMENTATIONS[platform]

    def attend(
        spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, state: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_pages, v_pages = write_pages(*state, k, v, batch)
        return paged_attention(spec, q, k_pages, v_pages, batch), (k_pages, v_pages)

    return attend


def whole_sequence(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, state: None
) -> tuple[jax.Array, None]:
    """Attention within one sequence that is computed from its first token on, in one go; there is no state."""
    return attention_reference.causal_attention(spec, q, k, v), state


def grouped_attention_for(platform: str, dtype: str, num_devices: int) -> GroupedAttention:
    """The implementation that steps use on a platform as JAX names it.

    The native kernel is for float32 on one CPU: the compiler does not know how to cut it across devices.
    """
    if platform == "cpu" and dtype == "float32" and num_devices == 1 and library.load():
        return native.grouped_attention
    return grouped_attention
