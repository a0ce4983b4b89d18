"""What runs on one NVIDIA GPU: kernels written in Pallas, which XLA compiles by Triton into the graph of a step."""

import jax

from quire.ops.attention_spec import AttentionSpec
from quire.ops.gpu.decode_attention import decode_attention
from quire.ops.gpu.fill_attention import fill_attention
from quire.ops.gpu.place_heads import place_heads
from quire.ops.grouped_attention import Groups
from quire.ops.step_attention import Kernels


def attend(spec: AttentionSpec, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, groups: Groups) -> jax.Array:
    if q.shape[1] == 1:
        return decode_attention(spec, q[:, 0], k_pages, v_pages, groups)[:, None]
    return fill_attention(spec, q, k_pages, v_pages, groups)


GPU = Kernels(place_heads, attend)
