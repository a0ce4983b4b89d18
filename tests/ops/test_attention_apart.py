"""Attention of prompts by a kernel that gives an array of its own, into which results of decodes are put."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.gpu.kernels import attend_by
from quire.ops.pages import PagedContext, Tiles

SPEC = AttentionSpec(kv_heads=2, group=3, head_dim=8, scale=0.4)
SINGLE, TOKENS = 4, 9


def prompts(q: jax.Array, context: PagedContext) -> jax.Array:
    """Anything for the tokens that are not of these tiles."""
    tiles = context.tiles
    place = jnp.arange(len(q))[:, None]
    is_own = ((place >= tiles.offsets) & (place < tiles.offsets + tiles.lengths)).any(axis=1)
    return jnp.where(is_own[:, None, None, None], tiled_attention(q, context), jnp.nan)


def declined(*_: Any) -> None:
    return None


@pytest.mark.parametrize("num_decodes", [0, 2, SINGLE])
@pytest.mark.parametrize("declines", [False, True])
def test_decodes_stand_beside_prompts(num_decodes: int, declines: bool) -> None:
    """Also where fewer decodes than there may be leave their places to prompts."""
    chance = np.random.default_rng(num_decodes)
    q, keys, values = (
        jnp.asarray(chance.normal(size=shape), jnp.float32)
        for shape in ((TOKENS, 2, 3, 8), (12, 4, 2, 8), (12, 4, 2, 8))
    )
    table = jnp.asarray(chance.permutation(np.arange(1, 12))[:10].reshape(5, 2), jnp.int32)
    places, is_decode = np.arange(SINGLE), np.arange(SINGLE) < num_decodes
    rest = TOKENS - num_decodes
    tiles = Tiles(
        slots=jnp.asarray([*places % 4, 1, 4]),
        starts=jnp.asarray([*places + 1, 0, 2]),
        lengths=jnp.asarray([*is_decode.astype(int), rest - 3, 3]),
        offsets=jnp.asarray([*places * is_decode, num_decodes, TOKENS - 3]),
        num_single=SINGLE,
    )
    assert rest - 3 <= 8

    def with_out(q: jax.Array, context: PagedContext, out: jax.Array | None) -> jax.Array:
        found = prompts(q, context)
        return found if out is None else jnp.where(jnp.isnan(found), out, found)

    attend = attend_by(tiled_attention, prefill=with_out, apart=declined if declines else prompts)
    context = PagedContext(SPEC, (keys, values), table, tiles)
    found, expected = attend(q, context), tiled_attention(q, context)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
