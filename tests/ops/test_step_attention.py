"""The attention of a step whose tokens are those of a few sequences, from the first on."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.heads import Heads, joined
from quire.ops.attention.reference import causal_attention
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import PLAIN, step_attention
from quire.ops.pages import KVWriteTargets, PageAccess, Pages, Segments, Tiles, put, write_targets

SPEC = AttentionSpec(kv_heads=2, group=3, head_dim=8, scale=0.4)
PAGE_SIZE, TOKENS, MOST = 4, 96, 4
plain = jax.jit(partial(step_attention, PLAIN, SPEC))
causal = jax.jit(causal_attention, static_argnums=0)


def laid_out(lengths: list[int]) -> PageAccess:
    """Sequences of these lengths one after the other, then padding."""
    table = jnp.asarray(np.random.default_rng(0).permutation(np.arange(1, 1 + 19 * 3)).reshape(3, 19))
    missing = TOKENS - sum(lengths)
    slots = np.repeat([*range(len(lengths)), 0], [*lengths, missing])
    positions = jnp.asarray([*(at for length in lengths for at in range(length)), *[-1] * missing])
    none = [-1] * (MOST - len(lengths))
    offsets = np.cumsum([0, *lengths[:-1]]).tolist()
    segments = Segments(jnp.asarray(offsets + none), jnp.asarray(lengths + none))
    targets = write_targets(table, jnp.asarray(slots), positions, PAGE_SIZE)
    return PageAccess(targets, table, Tiles.single(jnp.asarray(slots), positions), segments)


@pytest.mark.parametrize("lengths", [[41], [41, 16], [3, 20, 33]], ids=str)
def test_new_sequences_are_attended_to_as_their_tiles_are(lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(TOKENS, 2, 3, 8)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, TOKENS, 2, 8)), jnp.float32)
    empty = jnp.full((60, PAGE_SIZE, 2, 8), np.nan, jnp.float32)
    access, real = laid_out(lengths), slice(sum(lengths))
    expected, _ = plain(joined(q, k, v), (empty, empty), access._replace(segments=None))
    asked = []

    def attend_fresh(
        spec: AttentionSpec, q: jnp.ndarray, k: jnp.ndarray, v: jnp.ndarray, segments: Segments
    ) -> jnp.ndarray:
        asked.append([int(length) for length in segments.lengths if length >= 0])
        out = jnp.full(q.shape, np.nan)
        for offset, length in zip(segments.offsets.tolist(), segments.lengths.tolist(), strict=True):
            these = slice(offset, offset + length)
            if length >= 0:
                out = out.at[these].set(causal(spec, q[these], k[these], v[these]))
        return out

    kernels = PLAIN._replace(attend_fresh=attend_fresh)
    got, _ = step_attention(kernels, SPEC, joined(q, k, v), (empty, empty), access)
    assert asked == [lengths]
    np.testing.assert_allclose(got[real], expected[real], rtol=2e-5, atol=2e-6)
    declined, _ = plain(joined(q, k, v), (empty, empty), access)
    np.testing.assert_array_equal(declined, expected)


def test_one_new_sequence_is_first_offered_to_the_kernel_that_keeps_its_heads_in_codes() -> None:
    heads = joined(jnp.ones((TOKENS, 2, 3, 8)), *jnp.ones((2, TOKENS, 2, 8)))
    empty = jnp.zeros((60, PAGE_SIZE, 2, 8))
    rows, asked = jnp.full((TOKENS, 48), 7.0), []

    def prompt_in_codes(spec: AttentionSpec, heads: Heads, pages: Pages, targets: KVWriteTargets) -> Any:
        asked.append(heads.sinks)
        return (rows, pages) if spec.read_in is not None else None

    kernels = PLAIN._replace(prompt_in_codes=prompt_in_codes)
    access = laid_out([41])
    one = access._replace(segments=Segments(*(array[:1] for array in access.segments or ())))
    coded = replace(SPEC, read_in=jnp.float8_e4m3fn)
    got, pages = step_attention(kernels, coded, heads, (empty, empty), one)
    assert got is rows
    assert pages[0] is empty
    declined, _ = step_attention(kernels, SPEC, heads, (empty, empty), one)
    assert declined.shape == (TOKENS, 2, 3, 8)
    assert asked == [None, None]
    for others in (access, access._replace(segments=None)):  # several sequences, and tokens that go on with one
        step_attention(kernels, coded, heads, (empty, empty), others)
    assert len(asked) == 2


def test_padding_is_written_nowhere() -> None:
    """No two rows then have one place, which the compiler is told."""
    access = laid_out([5, 7])
    pages = jnp.full((58, PAGE_SIZE, 2), jnp.nan, jnp.bfloat16)
    rows = jnp.arange(2 * TOKENS, dtype=jnp.float32).reshape(TOKENS, 2)
    written = np.asarray(put(pages, rows, access.targets), np.float32)
    assert np.isnan(written[0]).all()
    at = access.targets.pages[:12], access.targets.offsets[:12]
    assert (written[at] == rows[:12]).all()
    assert np.isfinite(written).sum() == 12 * 2
