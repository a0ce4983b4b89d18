"""Attention as models call it: which implementation runs, and where the keys and values are."""

from collections.abc import Callable
from typing import Any

import jax

from quire.ops import attention_reference
from quire.ops.attention_spec import AttentionSpec
from quire.ops.heads import Heads
from quire.ops.pages import PagedBatch, write_pages

# attend(spec, heads, state) -> (out [t, k, g, h], state)
Attend = Callable[[AttentionSpec, Heads, Any], tuple[jax.Array, Any]]
PagedAttention = Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array, PagedBatch], jax.Array]

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
        spec: AttentionSpec, heads: Heads, state: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        q, k, v = heads.finished()
        k_pages, v_pages = write_pages(*state, k, v, batch)
        return paged_attention(spec, q, k_pages, v_pages, batch), (k_pages, v_pages)

    return attend


def whole_sequence(spec: AttentionSpec, heads: Heads, state: None) -> tuple[jax.Array, None]:
    """Attention within one sequence that is computed from its first token on, in one go; there is no state."""
    return attention_reference.causal_attention(spec, *heads.finished()), state
