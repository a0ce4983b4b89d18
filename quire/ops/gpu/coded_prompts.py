"""Attention of a long new prompt by cuDNN's products of e4m3, in two thirds of the time that those of bfloat16 take.

Queries, keys and values have one scale each, and so has the result, whose codes are rows of the product that follows.
What a scale must reach is taken from some of the tokens, with room to spare: a float is as exact at any scale. Keys are
held against their mean, which adds the same to all scores of a query: the softmax does not change, and keys of trained
models, which have much in common, lose less.
"""

from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.attention_spec import AttentionSpec
from quire.ops.rounded_rows import LARGEST_FLOAT8, LEAST_SCALE, RoundedRows

CODE = jnp.float8_e4m3fn
LEAST_TOKENS = 4096  # for fewer, rounding takes what the products gain
HEAD_DIM = 128  # that has been measured
EVERY = 16  # of tokens, one is looked at
ROOM = 4.0  # how much larger than those the others may be
LARGEST_WEIGHT = 256.0  # what a weight of 1 is in codes


def fits(spec: AttentionSpec, num_tokens: int) -> bool:
    plain = spec.sees_all and spec.softcap is None and not spec.has_sinks
    return plain and spec.head_dim == HEAD_DIM and num_tokens >= LEAST_TOKENS


def attend_in_codes(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, is_real: jax.Array, attention: Any = None
) -> RoundedRows:
    """As `AttendInCodes`, where it `fits`. `attention` gives codes of codes, as `by_cudnn` does."""
    k = k.astype(jnp.float32)
    given = q, k - k[::EVERY].mean(axis=0), v
    codes, scales = zip(*(_coded(one, is_real) for one in given), strict=True)
    out, v_scale = (attention or by_cudnn)(spec, codes, scales), scales[2]
    # Means of values are no larger than values, so that they have room in their scale.
    rows, row_scales = out.reshape(len(q), -1), jnp.broadcast_to(v_scale, (len(q), 1))
    return RoundedRows((rows.astype(jnp.float32) * row_scales).astype(q.dtype), rows, row_scales)


def _coded(x: jax.Array, is_real: jax.Array) -> tuple[jax.Array, jax.Array]:
    numbers = x.astype(jnp.float32)
    some = jnp.where(is_real[::EVERY].reshape(-1, *[1] * (x.ndim - 1)), numbers[::EVERY], 0.0)
    scale = jnp.maximum(jnp.abs(some).max() * (ROOM / LARGEST_FLOAT8), LEAST_SCALE)
    return jnp.clip(numbers * (1.0 / scale), -LARGEST_FLOAT8, LARGEST_FLOAT8).astype(CODE), scale


def by_cudnn(spec: AttentionSpec, codes: tuple[jax.Array, ...], scales: tuple[jax.Array, ...]) -> jax.Array:
    """Codes [t, n, h] of the result, in the scale of values."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    q, k, v = codes
    one = jnp.ones((1, 1, 1, 1), jnp.float32)
    q_scale, k_scale, v_scale = (scale * one for scale in scales)
    given: Any = {
        **dict.fromkeys(cudnn.fp8_params_keys, one),
        "descale_q": q_scale,
        "descale_k": k_scale,
        "descale_v": v_scale,
        "descale_s": one / LARGEST_WEIGHT,
        "scale_s": one * LARGEST_WEIGHT,
        "scale_o": one / v_scale,
    }
    out, *_ = cudnn.dot_product_attention(
        q.reshape(1, len(q), -1, spec.head_dim),
        k[None],
        v[None],
        scale=spec.scale,
        mask_type=cudnn.MaskType.CAUSAL,
        fp8_params=given,
        use_fp8=True,
    )
    rows: jax.Array = out[0]
    return rows
