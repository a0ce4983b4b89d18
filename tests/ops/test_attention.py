"""Attention within a sequence against dense attention in numpy, and where keys and values are written."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.heads import joined
from quire.ops.attention.reference import whole_sequence
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import place
from quire.ops.pages import write_targets

Array = np.ndarray[Any, Any]
HEAD_DIM = 4

# Few, for each is compiled: every option alone, and all of them together.
SPECS = (
    AttentionSpec(kv_heads=1, group=1, head_dim=HEAD_DIM, scale=0.5),
    AttentionSpec(kv_heads=2, group=3, head_dim=HEAD_DIM, scale=1.7),
    AttentionSpec(kv_heads=2, group=1, head_dim=HEAD_DIM, scale=1.7, window=1),
    AttentionSpec(kv_heads=1, group=2, head_dim=HEAD_DIM, scale=0.5, window=5),
    AttentionSpec(kv_heads=1, group=2, head_dim=HEAD_DIM, scale=0.5, chunk=4),
    AttentionSpec(kv_heads=2, group=2, head_dim=HEAD_DIM, scale=1.7, softcap=0.8),
    AttentionSpec(kv_heads=2, group=2, head_dim=HEAD_DIM, scale=1.7, softcap=0.8, window=3),
    AttentionSpec(kv_heads=2, group=3, head_dim=HEAD_DIM, scale=1.7, has_sinks=True),
    AttentionSpec(kv_heads=2, group=2, head_dim=HEAD_DIM, scale=1.7, softcap=0.8, window=3, has_sinks=True),
)


def sinks_of(spec: AttentionSpec) -> Array | None:
    """Scores around those of keys, another for each query head."""
    if not spec.has_sinks:
        return None
    return np.linspace(-2.0, 3.0, spec.kv_heads * spec.group, dtype=np.float32).reshape(spec.kv_heads, spec.group)


def first_seen(spec: AttentionSpec, position: int) -> int:
    if spec.chunk is not None:
        return position // spec.chunk * spec.chunk
    return 0 if spec.window is None else max(0, position + 1 - spec.window)


def dense(spec: AttentionSpec, q: Array, k: Array, v: Array, position: int) -> Array:
    """One token's attention, q [k, g, h], over the keys and values [s, k, h] of its sequence, head by head."""
    first = first_seen(spec, position)
    out = np.zeros_like(q)
    for kv_head in range(spec.kv_heads):
        keys, values = k[first : position + 1, kv_head], v[first : position + 1, kv_head]
        for member in range(spec.group):
            scores = keys @ q[kv_head, member] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            weights = np.exp(scores)
            sinks = sinks_of(spec)
            unused = 0.0 if sinks is None else np.exp(sinks[kv_head, member])
            out[kv_head, member] = weights @ values / (weights.sum() + unused)
    return out


@pytest.mark.parametrize("spec", SPECS)
def test_attention_within_a_whole_sequence_is_dense_attention(spec: AttentionSpec) -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(9, spec.kv_heads, spec.group, HEAD_DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, 9, spec.kv_heads, HEAD_DIM)).astype(np.float32)
    heads = joined(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
    sinks = sinks_of(spec)
    out, _ = whole_sequence(spec, heads if sinks is None else heads._replace(sinks=jnp.asarray(sinks)), None)
    for position in range(9):
        np.testing.assert_allclose(out[position], dense(spec, q[position], k, v, position), rtol=2e-4, atol=2e-5)


def test_padding_is_written_to_page_zero_and_nothing_else_changes() -> None:
    pages = jnp.arange(3 * 2 * 1 * 1, dtype=jnp.float32).reshape(3, 2, 1, 1)
    targets = write_targets(jnp.asarray([[2, 1]]), jnp.zeros(3, int), jnp.asarray([1, 2, -1]), page_size=2)
    k = jnp.asarray([10.0, 20.0, 30.0]).reshape(3, 1, 1)
    _, (k_pages, v_pages) = place(joined(k[:, :, None], k, -k), (pages, pages), targets)
    assert k_pages[..., 0, 0].tolist() == [[30, 1], [20, 3], [4, 10]]
    assert v_pages[..., 0, 0].tolist() == [[-30, 1], [-20, 3], [4, -10]]
