"""Attention of a long new prompt by cuDNN's products of e4m3, in two thirds of the time that those of bfloat16 take.

Queries, keys and values have one scale each, and so has the result, whose codes are rows of the product that follows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.attention.heads import Heads
from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.prompt_heads import CODE, PromptCodes, place_prompt
from quire.ops.pages import CodedPages, KVWriteTargets
from quire.ops.weights.rounded_rows import RoundedRows

LEAST_TOKENS = 4096  # for fewer, rounding takes what the products gain
HEAD_DIM = 128  # that has been measured
LARGEST_WEIGHT = 256.0  # what a weight of 1 is in codes


def fits(spec: AttentionSpec, pages: Any, num_tokens: int) -> bool:
    is_plain = spec.sees_all and spec.softcap is None and not spec.has_sinks
    is_coded = spec.read_in == CODE and isinstance(pages, CodedPages) and pages.k.dtype == CODE
    return is_plain and is_coded and spec.head_dim == HEAD_DIM and num_tokens >= LEAST_TOKENS


def by_cudnn(spec: AttentionSpec, codes: PromptCodes) -> jax.Array:
    """Codes [t, n, h] of the result, in the scale of values: means of those are no larger than they are."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    one = jnp.ones((1, 1, 1, 1), jnp.float32)
    q_scale, k_scale, v_scale = (scale * one for scale in codes.scales)
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
        codes.q.reshape(1, len(codes.q), -1, spec.head_dim),
        codes.k[None],
        codes.v[None],
        scale=spec.scale,
        mask_type=cudnn.MaskType.CAUSAL,
        fp8_params=given,
        use_fp8=True,
    )
    rows: jax.Array = out[0]
    return rows


def attend_to_prompt(
    spec: AttentionSpec,
    heads: Heads,
    pages: CodedPages,
    targets: KVWriteTargets,
    attention: Callable[[AttentionSpec, PromptCodes], jax.Array] = by_cudnn,
    *,
    interpret: bool = False,
) -> tuple[RoundedRows, CodedPages]:
    """As `PromptInCodes`, where it `fits`."""
    codes, pages = place_prompt(heads, pages, targets, interpret=interpret)
    rows = attention(spec, codes).reshape(len(codes.q), -1)
    scales = jnp.broadcast_to(codes.scales[2], (len(rows), 1))
    return RoundedRows((rows.astype(jnp.float32) * scales).astype(heads.qkv.dtype), rows, scales), pages
