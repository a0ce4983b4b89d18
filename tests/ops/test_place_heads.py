"""Keys and values reach their pages, and queries their positions, by the kernel as by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.heads import HeadNorm, Heads, Rotation
from quire.ops.attention.step_attention import place
from quire.ops.native import attention as native_attention
from quire.ops.native import library
from quire.ops.pages import KVWriteTargets

TOKENS, KV_HEADS, GROUP, SIZE, PAGE_SIZE = 37, 2, 3, 12, 4


def heads(rotated: int | None, normed: bool) -> Heads:
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.normal(size=(TOKENS, KV_HEADS, GROUP + 2, SIZE)), jnp.float32)
    rotation = None
    if rotated is not None:
        angles = rng.normal(size=(TOKENS, rotated // 2))
        rotation = Rotation(jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    norm = HeadNorm(jnp.asarray(rng.normal(size=SIZE), jnp.float32), 1e-5) if normed else None
    return Heads(qkv, rotation, norm, norm)


@pytest.mark.skipif(not library.load(), reason="there is no C++ compiler")
@pytest.mark.parametrize("rotated", [None, 8, SIZE])
@pytest.mark.parametrize("normed", [False, True])
def test_the_kernel_places_heads_as_xla_does(rotated: int | None, normed: bool) -> None:
    where = np.random.default_rng(1).permutation(np.arange(PAGE_SIZE, 60))[:TOKENS]  # page 0 is for padding
    targets = KVWriteTargets(jnp.asarray(where // PAGE_SIZE), jnp.asarray(where % PAGE_SIZE))
    made = heads(rotated, normed)
    results = []
    for how in (place, native_attention.place):
        pages = tuple(jnp.full((15, PAGE_SIZE, KV_HEADS, SIZE), value, jnp.float32) for value in (5.0, 6.0))
        results.append(jax.jit(lambda pages, how=how: how(made, pages, targets), donate_argnums=0)(pages))
    expected, got = (jax.tree.leaves(result) for result in results)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
