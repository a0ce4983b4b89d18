"""Writing heads by the kernel for GPUs, interpreted, against plain jnp."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gpu.place_heads import place_heads
from quire.ops.grouped_attention import Groups
from quire.ops.heads import HeadNorm, Heads
from quire.ops.rotation import Rotation
from quire.ops.step_attention import Places, place

NUM_PAGES, PAGE_SIZE = 7, 4


def heads(tokens: int, kv_heads: int, group: int, size: int, rotated: int = 0, norms: str = "", **norm: Any) -> Heads:
    rng = np.random.default_rng(tokens)
    angles = rng.uniform(0, 7, (tokens, rotated // 2))
    rotation = Rotation(jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    shapes = {"q": (kv_heads, group, size), "k": (kv_heads, size)}
    made = {
        which: HeadNorm(jnp.asarray(rng.normal(size=shapes[which] if "all" in norms else size), jnp.float32), **norm)
        for which in "qk"
        if which in norms
    }
    return Heads(
        jnp.asarray(rng.normal(size=(tokens, kv_heads, group + 2, size)), jnp.float32),
        rotation if rotated else None,
        made.get("q"),
        made.get("k"),
    )


@pytest.mark.parametrize(
    "given",
    [
        heads(1, 1, 1, 4),
        heads(5, 2, 3, 8, rotated=8),
        heads(19, 2, 1, 16, rotated=8),  # more than one block of tokens, the last not full, and only some rotated
        heads(6, 1, 4, 12, rotated=12, norms="q k", eps=1e-6),  # a size that is no power of two
        heads(6, 2, 2, 8, rotated=8, norms="k", eps=1e-6, offset=1.0),
        heads(6, 2, 2, 8, rotated=4, norms="q k all", eps=1e-5),
    ],
)
def test_heads_are_finished_and_written_as_plain_jnp_does(given: Heads) -> None:
    tokens, kv_heads, _, size = given.qkv.shape
    rng = np.random.default_rng(0)
    slots = rng.permutation(np.arange(PAGE_SIZE, NUM_PAGES * PAGE_SIZE))[:tokens]
    slots[-1] = 0  # padding
    nobody = Groups(*(jnp.zeros(shape, jnp.int32) for shape in ((0, 1), (0,), (0,))))
    places = Places(jnp.asarray(slots // PAGE_SIZE), jnp.asarray(slots % PAGE_SIZE), nobody, nobody)
    k_pages, v_pages = jnp.asarray(rng.normal(size=(2, NUM_PAGES, PAGE_SIZE, kv_heads, size)), jnp.float32)
    q, pages = place(given, (k_pages, v_pages), places)
    got_q, got_pages = place_heads(given, (k_pages, v_pages), places, interpret=True)
    np.testing.assert_allclose(got_q, q, rtol=1e-5, atol=1e-6)
    for got, expected in zip(got_pages, pages, strict=True):  # page 0 takes what nobody reads
        np.testing.assert_allclose(got[1:], expected[1:], rtol=1e-5, atol=1e-6)
