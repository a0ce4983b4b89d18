"""The attention of a launch whose tokens are one sequence's, from the first on."""

import jax.numpy as jnp
import numpy as np

from quire.ops.attention_reference import causal_attention
from quire.ops.attention_spec import AttentionSpec
from quire.ops.grouped_attention import Groups
from quire.ops.heads import joined
from quire.ops.step_attention import PLAIN, Places, step_attention

SPEC = AttentionSpec(kv_heads=2, group=3, head_dim=8, scale=0.4)
NUM_REAL, GROUP, PAGE_SIZE = 41, 16, 4


def test_a_sequence_alone_is_attended_to_as_its_groups_are() -> None:
    rng = np.random.default_rng(0)
    tokens = 4 * GROUP
    q = jnp.asarray(rng.normal(size=(tokens, 2, 3, 8)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, tokens, 2, 8)), jnp.float32)
    pages = tuple(jnp.full((20, PAGE_SIZE, 2, 8), np.nan, jnp.float32) for _ in range(2))
    table = jnp.asarray(rng.permutation(np.arange(1, 20))[None].repeat(4, 0), jnp.int32)
    at = np.arange(tokens)
    is_real = at < NUM_REAL
    places = Places(
        jnp.asarray(np.where(is_real, np.asarray(table)[0][at // PAGE_SIZE % 19], 0)),
        jnp.asarray(at % PAGE_SIZE),
        Groups(jnp.zeros((0, 19), jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)),
        Groups(table, jnp.arange(4) * GROUP, jnp.clip(NUM_REAL - jnp.arange(4) * GROUP, 0, GROUP)),
    )
    expected, _ = step_attention(PLAIN, SPEC, joined(q, k, v), pages, places)
    asked = []

    def attend_alone(spec: AttentionSpec, *qkv: jnp.ndarray) -> jnp.ndarray:
        asked.append(spec)
        return causal_attention(spec, *qkv)

    kernels = PLAIN._replace(attend_alone=attend_alone)
    got, _ = step_attention(kernels, SPEC, joined(q, k, v), pages, places, alone=True)
    assert asked == [SPEC]
    np.testing.assert_allclose(got[:NUM_REAL], expected[:NUM_REAL], rtol=2e-5, atol=2e-6)
    assert np.isfinite(got).all()
    declined, _ = step_attention(PLAIN, SPEC, joined(q, k, v), pages, places, alone=True)
    np.testing.assert_array_equal(declined, expected)
