"""What runs on one NVIDIA GPU: kernels written in Pallas, which XLA compiles by Triton into the graph of a step."""

from functools import partial

import jax
import jax.numpy as jnp

from quire.ops.attention_spec import AttentionSpec
from quire.ops.gpu import add_norm as sum_and_norm
from quire.ops.gpu.decode_attention import decode_attention
from quire.ops.gpu.fill_attention import fill_attention
from quire.ops.gpu.filter_cuts import filter_cuts
from quire.ops.gpu.place_heads import place_heads
from quire.ops.grouped_attention import Groups
from quire.ops.heads import Heads
from quire.ops.step_attention import Kernels, Pages, Places

# As functions of their own, they are traced and lowered once for all the layers of a step that are alike.


@jax.jit
def place(heads: Heads, state: Pages, places: Places) -> tuple[jax.Array, Pages]:
    return place_heads(heads, state, places)


@partial(jax.jit, static_argnums=0)
def attend(spec: AttentionSpec, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, groups: Groups) -> jax.Array:
    if q.shape[1] == 1:
        return decode_attention(spec, q[:, 0], k_pages, v_pages, groups)[:, None]
    return fill_attention(spec, q, k_pages, v_pages, groups)


@partial(jax.jit, static_argnums=0)
def attend_alone(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array | None:
    """By cuDNN, where it has a kernel: half as long again as ours takes over a long prompt."""
    if spec.window is not None or spec.softcap is not None or q.dtype == jnp.float32 or spec.head_dim > 128:
        return None
    out = jax.nn.dot_product_attention(
        q.reshape(1, len(q), -1, spec.head_dim),
        k[None],
        v[None],
        scale=spec.scale,
        is_causal=True,
        implementation="cudnn",
    )
    return out.reshape(q.shape)


@partial(jax.jit, static_argnums=(3, 4))
def add_norm(x: jax.Array, out: jax.Array, weight: jax.Array, eps: float, offset: float) -> tuple[jax.Array, jax.Array]:
    return sum_and_norm.add_norm(x, out, weight, eps, offset)


GPU = Kernels(place, attend, attend_alone, add_norm, filter_cuts)
