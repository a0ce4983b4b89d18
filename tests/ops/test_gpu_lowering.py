"""The GPU's attention kernels can be translated for a GPU, also where there is none: interpreting them shows less."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from quire.ops.attention_spec import AttentionSpec
from quire.ops.gpu.kernels import attend
from quire.ops.pages import TILE, Tiles

SPECS = {
    "groups of 4": AttentionSpec(2, 4, 128, 0.088),
    "groups of 3, odd heads": AttentionSpec(1, 3, 80, 0.125),
    "window, cap": AttentionSpec(1, 8, 64, 0.125, window=33, softcap=20.0),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("num_single", "num_tiles"), [(8, 8), (8, 16), (0, 160)], ids=["decodes", "mixed", "long"])
def test_attention_is_translated(name: str, dtype: str, num_single: int, num_tiles: int) -> None:
    spec = SPECS[name]
    tokens = num_single + (num_tiles - num_single) * TILE
    q = jnp.zeros((tokens, spec.kv_heads, spec.group, spec.head_dim), dtype)
    pages = jnp.zeros((4, 32, spec.kv_heads, spec.head_dim), dtype)
    each = jnp.zeros(num_tiles, jnp.int32)
    tiles = Tiles(each, each, each, each, num_single)
    traced = jax.jit(partial(attend, spec)).trace(q, (pages, pages), jnp.zeros((9, 40), jnp.int32), tiles)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("decode_attention" in text, "prefill_attention" in text) == (num_single > 0, num_tiles > num_single)
