"""A sum and its norm in one launch. XLA takes two and reads the sum again, or three for the outputs of experts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array, power_of_two, whole
from quire.ops.weights.deferred import VisitSums

WIDE = 2048  # features, from which on a row is shared by more threads


def add_norm(
    x: jax.Array, out: jax.Array, weight: jax.Array, eps: float, offset: float, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """As in quire.ops.norms."""
    tokens, size = x.shape
    all_rows = pl.BlockSpec((tokens, size), lambda _: (0, 0))
    total, normal = pl.pallas_call(
        partial(_add_norm, eps, offset),
        grid=(tokens,),
        in_specs=[all_rows, all_rows, pl.BlockSpec((size,), lambda _: (0,))],
        out_specs=[all_rows, all_rows],
        out_shape=[array(x.shape, x.dtype)] * 2,
        compiler_params=plgpu.CompilerParams(num_warps=4 if size < WIDE else 8, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(x, out, weight)
    return total, normal


def add_visits_norm(
    x: jax.Array, out: VisitSums, weight: jax.Array, eps: float, offset: float, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """As in quire.ops.norms."""
    operands = x, out.visits, out.shares, weight
    total, normal = pl.pallas_call(
        partial(_add_visits_norm, eps, offset),
        grid=(len(x),),
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(x), whole(x)],
        out_shape=[array(x.shape, x.dtype)] * 2,
        # With more threads, more of what experts gave is on its way at a time.
        compiler_params=plgpu.CompilerParams(num_warps=16, num_stages=1),
        interpret=interpret,
        name="add_visits_norm",
    )(*operands)
    return total, normal


def norm(x: jax.Array, weight: jax.Array, eps: float, offset: float, *, interpret: bool = False) -> jax.Array:
    """An RMSNormOp, as in quire.ops.norms."""
    size = weight.size
    rows = x.reshape(-1, size)
    all_rows = pl.BlockSpec(rows.shape, lambda _: (0, 0))
    normal = pl.pallas_call(
        partial(_norm, eps, offset),
        grid=(len(rows),),
        in_specs=[all_rows, pl.BlockSpec((size,), lambda _: (0,))],
        out_specs=all_rows,
        out_shape=array(rows.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4 if size < WIDE else 8, num_stages=1),
        interpret=interpret,
        name="norm",
    )(rows, weight.reshape(size))
    return normal.reshape(x.shape)  # type: ignore[no-any-return]


# All of a row is loaded before anything is stored or added up: a load behind those would wait for them.


def _norm(eps: float, offset: float, x_ref: Any, weight_ref: Any, normal_ref: Any) -> None:
    row, (feature, real) = pl.program_id(0), _features(x_ref)
    wide, weight = (_load(ref, real) for ref in (x_ref.at[row, feature], weight_ref.at[feature]))
    scale = jax.lax.rsqrt((wide * wide).sum() / x_ref.shape[1] + eps)
    plgpu.store(normal_ref.at[row, feature], (wide * scale * (weight + offset)).astype(normal_ref.dtype), mask=real)


def _add_norm(
    eps: float, offset: float, x_ref: Any, out_ref: Any, weight_ref: Any, total_ref: Any, normal_ref: Any
) -> None:
    row, (feature, real) = pl.program_id(0), _features(x_ref)
    x, out, weight = (
        _load(ref, real) for ref in (x_ref.at[row, feature], out_ref.at[row, feature], weight_ref.at[feature])
    )
    _store_sum(x + out, weight + offset, eps, total_ref, normal_ref)


def _add_visits_norm(
    eps: float,
    offset: float,
    x_ref: Any,
    visits_ref: Any,
    shares_ref: Any,
    weight_ref: Any,
    total_ref: Any,
    normal_ref: Any,
) -> None:
    row, (feature, real) = pl.program_id(0), _features(x_ref)
    x, weight = _load(x_ref.at[row, feature], real), _load(weight_ref.at[feature], real)
    choices = range(visits_ref.shape[1])
    visits = [_load(visits_ref.at[row, choice, feature], real) for choice in choices]
    shares = [shares_ref[row, choice] for choice in choices]
    out = visits[0] * shares[0]
    for visit, share in zip(visits[1:], shares[1:], strict=True):
        out = out + visit * share
    out = out.astype(x_ref.dtype).astype(jnp.float32)  # as the outputs of other blocks are
    _store_sum(x + out, weight + offset, eps, total_ref, normal_ref)


def _store_sum(total: jax.Array, factors: jax.Array, eps: float, total_ref: Any, normal_ref: Any) -> None:
    row, (feature, real) = pl.program_id(0), _features(total_ref)
    total = total.astype(total_ref.dtype)  # rounded first: it is what the next layer adds to
    plgpu.store(total_ref.at[row, feature], total, mask=real)
    wide = total.astype(jnp.float32)
    scale = jax.lax.rsqrt((wide * wide).sum() / total_ref.shape[1] + eps)
    plgpu.store(normal_ref.at[row, feature], (wide * scale * factors).astype(normal_ref.dtype), mask=real)


def _features(x_ref: Any) -> tuple[jax.Array, jax.Array]:
    """Of a row, and which of them there are."""
    feature = jnp.arange(power_of_two(x_ref.shape[1]))
    return feature, feature < x_ref.shape[1]


def _load(ref: Any, real: jax.Array) -> jax.Array:
    return plgpu.load(ref, mask=real, other=0.0).astype(jnp.float32)
