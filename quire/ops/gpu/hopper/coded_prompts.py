"""Attention of a long new prompt by cuDNN's products of e4m3, in two thirds of the time that those of bfloat16 take.

Queries, keys and values have one scale each, and so has the result, whose codes are rows of the product that follows.
The scales are found from some of the tokens, with room to spare: a float is as exact at any scale. The mean of the keys
is subtracted from them. It adds the same to all scores of a query, so the softmax does not change, and keys of trained
models, which have much in common, lose less to rounding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention.heads import Heads
from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.place_heads import HeadKernelInputs, PageWriter, operands_of
from quire.ops.gpu.tiles import array, whole
from quire.ops.pages import CodedPages, KVWriteTargets
from quire.ops.weights.rounded_rows import LARGEST_FLOAT8, LEAST_SCALE, RoundedRows

CODE = jnp.float8_e4m3fn
EVERY = 32  # of so many tokens one is sampled for the scales
ROOM = 4.0  # how much larger than the sampled ones others may be, and keys less their mean
LOOKED_AT = 16  # sampled tokens of a program
PLACED = 8  # tokens of a program


class PromptCodes(NamedTuple):
    q: jax.Array  # [t, k, g, h]
    k: jax.Array  # [t, k, h]; of padding, zeros, as are values
    v: jax.Array
    scales: jax.Array  # float32 [3], of each


def place_prompt(
    heads: Heads, pages: CodedPages, targets: KVWriteTargets, *, interpret: bool = False
) -> tuple[PromptCodes, CodedPages]:
    """The heads of a prompt, and the pages with its keys and values, as `place` writes them."""
    inputs, arrays = operands_of(heads)
    tokens, kv_heads, parts, size = arrays[0].shape
    reach, sums = _look(inputs, arrays, targets, interpret)
    scales = jnp.maximum(reach.reshape(-1, 3).max(axis=0) * (ROOM / LARGEST_FLOAT8), LEAST_SCALE)
    mean = sums.sum(axis=0) * (EVERY / tokens)
    of_block = pl.BlockSpec((PLACED,), lambda index, head: (index,))
    operands = [*targets, *arrays, 1.0 / scales, mean, *pages]
    codes = [array((tokens, kv_heads, *group, size), CODE) for group in ((parts - 2,), (), ())]
    out_shapes = [*codes, *(array(page.shape, page.dtype) for page in pages)]
    first = len(operands) - len(pages)
    q, k, v, *written = pl.pallas_call(
        partial(_place, inputs, heads.qkv.dtype),
        grid=(pl.cdiv(tokens, PLACED), kv_heads),
        in_specs=[of_block, of_block, *map(whole, operands[2:])],
        out_specs=[whole(operand) for operand in out_shapes],
        out_shape=out_shapes,
        input_output_aliases={first + index: len(codes) + index for index in range(len(pages))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="place_prompt",
    )(*operands)
    return PromptCodes(q, k, v, scales), CodedPages(*written)


def _look(
    inputs: HeadKernelInputs, arrays: list[jax.Array], targets: KVWriteTargets, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Of some tokens: the largest sizes [n, k, 3] of queries, keys and values, and sums of keys [n, k, h]."""
    tokens, kv_heads, _, size = arrays[0].shape
    count = pl.cdiv(tokens, EVERY * LOOKED_AT)
    operands = [targets.pages, *arrays]
    out_shapes = [*[array((count, kv_heads), jnp.float32)] * 3, array((count, kv_heads, size), jnp.float32)]
    *reach, sums = pl.pallas_call(
        partial(_look_at_some, inputs, arrays[0].dtype),
        grid=(count, kv_heads),
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(operand) for operand in out_shapes],
        out_shape=out_shapes,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="look_at_prompt",
    )(*operands)
    return jnp.stack(reach, axis=-1), sums


def _look_at_some(inputs: HeadKernelInputs, dtype: Any, pages_ref: Any, *refs: Any) -> None:
    *arrays, q_ref, k_ref, v_ref, sums_ref = refs
    heads, (q_norm, k_norm) = inputs.reader(arrays, LOOKED_AT, dtype, EVERY)
    where, parts, features = (pl.program_id(0), heads.head), heads.parts, heads.features
    is_real = plgpu.load(pages_ref.at[heads.tokens], mask=heads.is_token, other=0)[:, None] > 0

    def part(number: int, norm: Any) -> jax.Array:
        loaded = heads.load(jnp.int32(number), features, heads.real)
        head = loaded if number == parts - 1 else heads.finished(loaded, jnp.int32(number), [(norm, True)])
        return jnp.where(heads.real & is_real, head.astype(jnp.float32), 0.0)

    reach = jnp.float32(0.0)
    for query in range(parts - 2):
        reach = jnp.maximum(reach, jnp.abs(part(query, q_norm)).max())
    key = part(parts - 2, k_norm)
    q_ref[where], k_ref[where] = reach, jnp.abs(key).max()
    v_ref[where] = jnp.abs(part(parts - 1, None)).max()
    plgpu.store(sums_ref.at[(*where, features)], key.sum(axis=0), mask=features < sums_ref.shape[2])


def _place(inputs: HeadKernelInputs, dtype: Any, pages_ref: Any, offsets_ref: Any, *refs: Any) -> None:
    num_pages = len(CodedPages._fields)
    q_ref, k_ref, v_ref, *page_refs = refs[-3 - num_pages :]
    arrays = list(refs[: -3 - 2 * num_pages])
    mean_ref, inverse_ref = arrays.pop(), arrays.pop()
    heads, (q_norm, k_norm) = inputs.reader(arrays, PLACED, dtype)
    writer = PageWriter(heads, pages_ref, offsets_ref, page_refs)
    features, real, parts = heads.features, heads.real, heads.parts
    token, head, feature = heads.token, heads.head, heads.feature
    for query in range(parts - 2):
        number = jnp.int32(query)
        finished = heads.finished(heads.load(number, features, real), number, [(q_norm, True)])
        plgpu.store(q_ref.at[token, head, number, feature], _codes(finished, inverse_ref[0]), mask=real)
    key, value = jnp.int32(parts - 2), jnp.int32(parts - 1)
    k = heads.finished(heads.load(key, features, real), key, [(k_norm, True)])
    v = heads.load(value, features, real)
    writer.store(0, k, True)
    writer.store(1, v, True)
    mean = plgpu.load(mean_ref.at[head, features], mask=features < mean_ref.shape[1], other=0.0)[None, :]
    # Padding is zero: a weight of zero does not silence NaN.
    is_real = writer.is_real[:, None]
    for out_ref, numbers, inverse in (
        (k_ref, k.astype(jnp.float32) - mean, inverse_ref[1]),
        (v_ref, v, inverse_ref[2]),
    ):
        codes = _codes(jnp.where(is_real, numbers.astype(jnp.float32), 0.0), inverse)
        plgpu.store(out_ref.at[token, head, feature], codes, mask=real)


def _codes(numbers: jax.Array, inverse: jax.Array) -> jax.Array:
    """Triton's bounds drop NaN, which must stay."""
    scaled = numbers.astype(jnp.float32) * inverse
    bounded = jnp.clip(scaled, -LARGEST_FLOAT8, LARGEST_FLOAT8)
    return jnp.where(jnp.isnan(scaled), scaled, bounded).astype(CODE)


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
