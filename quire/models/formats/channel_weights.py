"""Weights quantised on their devices: e4m3 or int8 codes, and one scale for each output.

They are the types of quantised checkpoints, so that products, cuts and sizes are the same.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp

from quire.models.params import Param
from quire.ops.weights.activation_rounding import Rounding
from quire.ops.weights.coded import LARGEST_INT8, Coded
from quire.ops.weights.rounded_rows import LARGEST_FLOAT8, LEAST_SCALE

Kind = Literal["none", "int8", "fp8"]  # as --quantize has it, of a weight that it applies to
Placement = Callable[[Param], jax.sharding.Sharding]
_DTYPES = {"fp8": "float8_e4m3fn", "int8": "int8"}


def is_quantized(param: Param) -> bool:
    """True of matrices of layers, those of experts among them. Norms, biases and routers stay, and so do the embedding
    and the head: they would cost as much quality as all layers together."""
    return (param.num_contracted > 0 and param.axes[0] != "vocab") or param.is_of_experts


def channel_weight(weight: jax.Array, param: Param, kind: Kind, placement: Placement | None = None) -> Coded:
    """A weight in place of its floats, which are free when the caller drops them."""
    where = None
    if placement is not None:
        where = tuple(placement(_as(param, *one)) for one in _arrays(param))
    codes, scales = _quantized(param.contracted, kind, where)(weight)
    return _coded(param, kind, codes, scales)


def channel_like(param: Param, kind: Kind) -> Coded:
    """The shapes and dtypes of what `channel_weight` gives."""
    (shape, _), (scales, _) = _arrays(param)
    return _coded(
        param,
        kind,
        jax.ShapeDtypeStruct(shape, jnp.dtype(_DTYPES[kind])),  # type: ignore[no-untyped-call]
        jax.ShapeDtypeStruct(scales, jnp.dtype("float32")),  # type: ignore[no-untyped-call]
    )


def _coded(param: Param, kind: Kind, codes: Any, scales: Any) -> Coded:
    contracted = param.contracted
    return Coded(
        codes=codes,
        scales=scales,
        zeros=None,
        index=None,
        input_scale=None,
        input_zero=None,
        shape=param.shape,
        num_contracted=contracted,
        is_of_experts=param.is_of_experts,
        bits=8,
        group=prod(param.shape[-contracted:]),
        rounding=Rounding(is_float=kind == "fp8"),
    )


def _arrays(param: Param) -> list[tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Shapes and axes of codes and scales."""
    at = len(param.shape) - param.contracted
    return [(param.shape, param.axes), ((*param.shape[:at], 1), (*param.axes[:at], None))]


def _as(param: Param, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Param:
    return replace(param, shape=shape, axes=axes)


@cache  # layers repeat their shapes: one compilation each
def _quantized(
    num_contracted: int, kind: Kind, where: tuple[jax.sharding.Sharding, ...] | None
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    @partial(jax.jit, out_shardings=where)
    def quantize(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = tuple(range(weight.ndim - num_contracted, weight.ndim))
        most = LARGEST_FLOAT8 if kind == "fp8" else LARGEST_INT8
        reach = jnp.max(jnp.abs(weight), axis=inputs, keepdims=True).astype(jnp.float32)
        scales = reach / most
        scales = jnp.where(scales < LEAST_SCALE, 1.0, scales)  # of zeros, or as good as zeros
        numbers = jnp.clip(weight.astype(jnp.float32) / scales, -most, most)
        codes = (numbers if kind == "fp8" else jnp.round(numbers)).astype(_DTYPES[kind])
        return codes, scales.reshape(*weight.shape[: inputs[0]], 1)

    return quantize
