"""Paged attention against dense attention in numpy, over random page tables, lengths, windows and caps."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.ops.attention import IMPLEMENTATIONS, PagedAttention, paged_attend, whole_sequence
from quire.ops.attention_spec import AttentionSpec
from quire.ops.heads import joined
from quire.ops.pages import PagedBatch, write_pages

Array = np.ndarray[Any, Any]
HEAD_DIM = 4


NUM_ROWS = 4
NUM_TOKENS = 10
MAX_CONTEXT = 12


class Row(NamedTuple):
    context: int  # this step's tokens included
    chunk: int


@st.composite
def steps(draw: st.DrawFn) -> list[Row]:
    """Rows with from none to all of their context in this step; what is left of its tokens is padding."""
    rows, room = [], NUM_TOKENS
    for _ in range(NUM_ROWS):
        context = draw(st.integers(0, MAX_CONTEXT))
        chunk = draw(st.integers(0, min(context, room)))
        room -= chunk
        rows.append(Row(context, chunk))
    return rows


# Few, for each is compiled: every option alone, and all of them together.
SPECS = (
    AttentionSpec(kv_heads=1, group=1, head_dim=HEAD_DIM, scale=0.5),
    AttentionSpec(kv_heads=2, group=3, head_dim=HEAD_DIM, scale=1.7),
    AttentionSpec(kv_heads=2, group=1, head_dim=HEAD_DIM, scale=1.7, window=1),
    AttentionSpec(kv_heads=1, group=2, head_dim=HEAD_DIM, scale=0.5, window=5),
    AttentionSpec(kv_heads=2, group=2, head_dim=HEAD_DIM, scale=1.7, softcap=0.8),
    AttentionSpec(kv_heads=2, group=2, head_dim=HEAD_DIM, scale=1.7, softcap=0.8, window=3),
)
specs = st.sampled_from(SPECS)


@cache
def compiled(spec: AttentionSpec, paged_attention: PagedAttention) -> Any:
    @jax.jit
    def run(batch: PagedBatch, q: jax.Array, k: jax.Array, v: jax.Array, state: Any) -> jax.Array:
        k_pages, v_pages = write_pages(*state, k, v, batch)
        return paged_attention(spec, q, k_pages, v_pages, batch)

    return run


def dense(spec: AttentionSpec, q: Array, k: Array, v: Array, position: int) -> Array:
    """One token's attention, q [k, g, h], over the keys and values [s, k, h] of its sequence, head by head."""
    first = 0 if spec.window is None else max(0, position + 1 - spec.window)
    out = np.zeros_like(q)
    for kv_head in range(spec.kv_heads):
        keys, values = k[first : position + 1, kv_head], v[first : position + 1, kv_head]
        for member in range(spec.group):
            scores = keys @ q[kv_head, member] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            weights = np.exp(scores - scores.max())
            out[kv_head, member] = weights @ values / weights.sum()
    return out


# Those that are different, with their names: what several platforms share is tried once.
IN_USE = {paged_attention.__module__: paged_attention for paged_attention in IMPLEMENTATIONS.values()}


@pytest.mark.parametrize("implementation", IN_USE)
@given(spec=specs, rows=steps(), seed=st.integers(0, 99))
def test_paged_attention_is_dense_attention(
    implementation: str, spec: AttentionSpec, rows: list[Row], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Page sizes differ between specs, so that one compilation serves each.
    page_size = (1, 2, 4)[SPECS.index(spec) % 3]
    width = MAX_CONTEXT // page_size + 1
    num_pages = 1 + NUM_ROWS * width
    table = rng.permutation(np.arange(1, num_pages)).reshape(NUM_ROWS, width)
    # Whatever was not written is NaN, in the pages of a row beyond its context too.
    k_pages = np.full((num_pages, page_size, spec.kv_heads, HEAD_DIM), np.nan, np.float32)
    v_pages = k_pages.copy()
    shape = (NUM_ROWS, MAX_CONTEXT, spec.kv_heads, HEAD_DIM)
    keys, values = rng.normal(size=(2, *shape)).astype(np.float32)
    row_of_token = np.zeros(NUM_TOKENS, int)
    positions = np.full(NUM_TOKENS, -1)
    k, v = np.full((2, NUM_TOKENS, spec.kv_heads, HEAD_DIM), np.nan, np.float32)
    real = 0
    for index, row in enumerate(rows):
        for position in range(row.context):
            if position < row.context - row.chunk:
                slot = table[index, position // page_size], position % page_size
                k_pages[slot], v_pages[slot] = keys[index, position], values[index, position]
            else:
                row_of_token[real], positions[real] = index, position
                k[real], v[real] = keys[index, position], values[index, position]
                real += 1

    q = rng.normal(size=(NUM_TOKENS, spec.kv_heads, spec.group, HEAD_DIM)).astype(np.float32)
    batch = PagedBatch(table, row_of_token, positions, np.asarray([row.context for row in rows]))
    out = np.asarray(compiled(spec, IN_USE[implementation])(batch, q, k, v, (k_pages, v_pages)))
    for token in range(real):
        row = row_of_token[token]
        expected = dense(spec, q[token], keys[row], values[row], positions[token])
        np.testing.assert_allclose(out[token], expected, rtol=2e-4, atol=2e-5)
    assert np.all(out[real:] == 0)


@pytest.mark.parametrize("spec", SPECS)
def test_attention_within_a_whole_sequence_is_dense_attention(spec: AttentionSpec) -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(9, spec.kv_heads, spec.group, HEAD_DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, 9, spec.kv_heads, HEAD_DIM)).astype(np.float32)
    out, _ = whole_sequence(spec, joined(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)), None)
    for position in range(9):
        np.testing.assert_allclose(out[position], dense(spec, q[position], k, v, position), rtol=2e-4, atol=2e-5)


def test_padding_is_written_to_page_zero_and_nothing_else_changes() -> None:
    pages = jnp.arange(3 * 2 * 1 * 1, dtype=jnp.float32).reshape(3, 2, 1, 1)
    batch = PagedBatch(jnp.asarray([[2, 1]]), jnp.zeros(3, int), jnp.asarray([1, 2, -1]), jnp.asarray([3]))
    k = jnp.asarray([10.0, 20.0, 30.0]).reshape(3, 1, 1)
    k_pages, v_pages = write_pages(pages, pages, k, -k, batch)
    assert k_pages[..., 0, 0].tolist() == [[30, 1], [20, 3], [4, 10]]
    assert v_pages[..., 0, 0].tolist() == [[-30, 1], [-20, 3], [4, -10]]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_platform_has_an_implementation(platform: str) -> None:
    batch = PagedBatch(jnp.ones((1, 1), int), jnp.zeros(1, int), jnp.zeros(1, int), jnp.ones(1, int))
    spec = AttentionSpec(kv_heads=1, group=1, head_dim=2, scale=1.0)
    one = jnp.ones((1, 1, 2))
    pages = jnp.zeros((2, 1, 1, 2))
    out, _ = paged_attend(batch, platform)(spec, joined(one[:, :, None], one, 3 * one), (pages, pages))
    assert out.tolist() == [[[[3.0, 3.0]]]]
