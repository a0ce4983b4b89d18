"""The attention of a launch whose tokens are those of a few sequences, from the first on."""

import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention_reference import causal_attention
from quire.ops.attention_spec import AttentionSpec
from quire.ops.grouped_attention import Groups
from quire.ops.heads import joined
from quire.ops.step_attention import PLAIN, Places, Segments, step_attention

SPEC = AttentionSpec(kv_heads=2, group=3, head_dim=8, scale=0.4)
GROUP, PAGE_SIZE, NUM_GROUPS = 16, 4, 6
NO_ROWS = Groups(jnp.zeros((0, 19), jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32))


def laid_out(lengths: list[int]) -> tuple[Places, np.ndarray]:
    """Sequences of these lengths in groups after each other, then padding; and which tokens are real."""
    rng = np.random.default_rng(0)
    tables, starts, counts = [], [], []
    free = rng.permutation(np.arange(1, 60))
    for length in lengths:
        table, free = free[:19], free[19:]
        for start in range(0, length, GROUP):
            tables.append(table)
            starts.append(start)
            counts.append(min(GROUP, length - start))
    missing = NUM_GROUPS - len(starts)
    fills = Groups(
        jnp.asarray([*tables, *[np.zeros(19, int)] * missing], jnp.int32),
        jnp.asarray(starts + [0] * missing, jnp.int32),
        jnp.asarray(counts + [0] * missing, jnp.int32),
    )
    at = np.asarray(fills.starts)[:, None] + np.arange(GROUP)
    is_real = np.arange(GROUP) < np.asarray(fills.lengths)[:, None]
    pages = np.where(is_real, np.take_along_axis(np.asarray(fills.page_table), at // PAGE_SIZE, axis=1), 0)
    places = Places(jnp.asarray(pages.reshape(-1)), jnp.asarray((at % PAGE_SIZE).reshape(-1)), NO_ROWS, fills)
    return places, is_real.reshape(-1)


@pytest.mark.parametrize("lengths", [[41], [41, 16], [3, 20, 33]], ids=str)
def test_sequences_alone_are_attended_to_as_their_groups_are(lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    tokens = NUM_GROUPS * GROUP
    q = jnp.asarray(rng.normal(size=(tokens, 2, 3, 8)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, tokens, 2, 8)), jnp.float32)
    pages = tuple(jnp.full((60, PAGE_SIZE, 2, 8), np.nan, jnp.float32) for _ in range(2))
    places, is_real = laid_out(lengths)
    expected, _ = step_attention(PLAIN, SPEC, joined(q, k, v), pages, places)
    asked = []

    def attend_alone(
        spec: AttentionSpec, q: jnp.ndarray, k: jnp.ndarray, v: jnp.ndarray, segments: Segments
    ) -> jnp.ndarray:
        asked.append([int(length) for length in segments.lengths if length >= 0])
        out = jnp.full(q.shape, np.nan)
        for offset, length in zip(segments.offsets.tolist(), segments.lengths.tolist(), strict=True):
            these = slice(offset, offset + length)
            if length >= 0:
                out = out.at[these].set(causal_attention(spec, q[these], k[these], v[these]))
        return out

    kernels = PLAIN._replace(attend_alone=attend_alone)
    got, _ = step_attention(kernels, SPEC, joined(q, k, v), pages, places, alone=4)
    assert asked == [lengths]
    np.testing.assert_allclose(got[is_real], expected[is_real], rtol=2e-5, atol=2e-6)
    declined, _ = step_attention(PLAIN, SPEC, joined(q, k, v), pages, places, alone=4)
    np.testing.assert_array_equal(declined, expected)
