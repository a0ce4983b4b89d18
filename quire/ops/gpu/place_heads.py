"""Norms, rotation and the writing of keys and values, in one launch: XLA would make six of it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array, power_of_two
from quire.ops.heads import HeadNorm, Heads, joined
from quire.ops.step_attention import Pages, Places

MOST_TOKENS = 16  # of a program


def place_heads(heads: Heads, state: Pages, places: Places, *, interpret: bool = False) -> tuple[jax.Array, Pages]:
    """As `place` in quire.ops.step_attention."""
    if any(norm is not None and norm.weight.ndim > 1 for norm in (heads.q_norm, heads.k_norm)):
        heads = joined(*heads.finished())  # a norm over all heads, which no program sees together
    tokens, kv_heads, parts, size = heads.qkv.shape
    block = min(MOST_TOKENS, power_of_two(tokens))
    of_block = pl.BlockSpec((block,), lambda index, head, part: (index,))
    extras = [*(heads.rotation or ()), *(norm.weight for norm in (heads.q_norm, heads.k_norm) if norm is not None)]
    operands = [places.pages, places.offsets, heads.qkv, *extras, *state]
    shapes = [(tokens, kv_heads, parts - 2, size), *(pages.shape for pages in state)]
    dtypes = [heads.qkv.dtype, *(pages.dtype for pages in state)]
    q, k_pages, v_pages = pl.pallas_call(
        partial(_place, _numbers(heads.q_norm), _numbers(heads.k_norm), heads.rotation is not None),
        grid=(-(-tokens // block), kv_heads, parts),
        in_specs=[of_block, of_block, *(_whole(operand.shape) for operand in operands[2:])],
        out_specs=[_whole(shape) for shape in shapes],
        out_shape=[array(*of) for of in zip(shapes, dtypes, strict=True)],
        input_output_aliases={len(operands) - 2: 1, len(operands) - 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="place_heads",
    )(*operands)
    return q, (k_pages, v_pages)


def _numbers(norm: HeadNorm | None) -> tuple[float, float] | None:
    return None if norm is None else (norm.eps, norm.offset)


def _whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _place(
    q_norm: tuple[float, float] | None,
    k_norm: tuple[float, float] | None,
    rotates: bool,
    pages_ref: Any,
    offsets_ref: Any,
    qkv_ref: Any,
    *refs: Any,
) -> None:
    *extras, _, _, q_ref, k_ref, v_ref = refs
    tokens, _, parts, size = qkv_ref.shape
    (block,) = pages_ref.shape
    index, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    token = (index * block + jnp.arange(block))[:, None]
    feature = jnp.arange(power_of_two(size))[None, :]
    real = (token < tokens) & (feature < size)
    is_query, is_key = part < parts - 2, part == parts - 2
    x = plgpu.load(qkv_ref.at[token, head, part, feature], mask=real, other=0.0)
    rotation_refs: list[Any] = [extras.pop(0) for _ in range(2 * rotates)]
    norms = [(norm, extras.pop(0), who) for norm, who in ((q_norm, is_query), (k_norm, is_key)) if norm is not None]

    def normal(values: jax.Array, feature: jax.Array) -> jax.Array:
        """Of the features of a head, in whatever order they come."""
        squares = x.astype(jnp.float32) * x.astype(jnp.float32)
        mean = squares.sum(axis=1, keepdims=True) / size
        out = values
        for (eps, offset), ref, applies in norms:
            weight = plgpu.load(ref.at[feature], mask=feature < size, other=0.0).astype(jnp.float32)
            scaled = values.astype(jnp.float32) * jax.lax.rsqrt(mean + eps) * (weight + offset)
            out = jnp.where(applies, scaled.astype(out.dtype), out)
        return out

    finished = normal(x, feature)
    if rotates:
        cos_ref, sin_ref = rotation_refs
        half = cos_ref.shape[1]
        partner = jnp.where(feature < half, feature + half, jnp.maximum(feature - half, 0))
        rotated = (token < tokens) & (feature < 2 * half)
        other = normal(plgpu.load(qkv_ref.at[token, head, part, partner], mask=rotated, other=0.0), partner)
        angle = jnp.where(feature < half, feature, feature - half)
        cos = plgpu.load(cos_ref.at[token, angle], mask=rotated, other=1.0)
        sin = plgpu.load(sin_ref.at[token, angle], mask=rotated, other=0.0)
        turned = finished * cos + jnp.where(feature < half, -other.astype(jnp.float32), other) * sin
        finished = jnp.where(is_query | is_key, turned.astype(finished.dtype), finished)
    plgpu.store(q_ref.at[token, head, part, feature], finished, mask=real & is_query)
    page = plgpu.load(pages_ref, mask=token[:, 0] < tokens, other=0)[:, None]
    offset = plgpu.load(offsets_ref, mask=token[:, 0] < tokens, other=0)[:, None]
    where = page, offset, head, feature
    plgpu.store(k_ref.at[where], finished.astype(k_ref.dtype), mask=real & is_key)
    plgpu.store(v_ref.at[where], x.astype(v_ref.dtype), mask=real & (part == parts - 1))
