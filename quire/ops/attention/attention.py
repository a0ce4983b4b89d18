"""Attention as models call it."""

from collections.abc import Callable
from typing import Any

import jax

from quire.ops.attention import reference as attention_reference
from quire.ops.attention.heads import Heads
from quire.ops.attention.spec import AttentionSpec
from quire.ops.weights.rounded_rows import Rows, scaled

# attend(spec, heads, state) -> (out [t, k, g, h], state); the last axis is `value_dim` where the spec has one. Without
# that, `out` may be rows [t, k * g * h] that have codes.
Attend = Callable[[AttentionSpec, Heads, Any], tuple[Rows, Any]]


def whole_sequence(spec: AttentionSpec, heads: Heads, state: None) -> tuple[jax.Array, None]:
    """Attention within one sequence that is computed from its first token on, in one go; there is no state."""
    if spec.value_dim is not None:
        qk = scaled(heads.qkv)
        q, k = qk[:, :, :-1], qk[:, :, -1]
        return attention_reference.causal_attention(spec, q, k, k)[..., : spec.value_dim], state
    return attention_reference.causal_attention(spec, *heads.finished(), heads.sinks), state
