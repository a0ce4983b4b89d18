"""Random weights, to measure and test models without their files."""

import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.files.progress import Progress, silent
from quire.models.checkpoint import (
    Placement,
    Quantize,
    for_kernels,
    has_channels,
    is_grouped,
    leaves,
    map_params,
    placed,
    quantized,
)
from quire.models.formats.channel_weights import channel_weight
from quire.models.model import Model
from quire.models.params import Param, ParamTree

_NORM_SPREAD = 0.1
_BIAS_SPREAD = 0.02


def random_weights(
    model: Model,
    *,
    seed: int,
    dtype: str,
    quantize: Quantize = "none",
    placement: Placement | None = None,
    progress: Progress = silent,
) -> ParamTree:
    """Weights made on their devices, the same for a seed however they are sharded.

    Matrices keep the size of what they multiply and norms are near one, so that activations stay in range through
    any number of layers, and logits differ.
    """
    params = model.params()
    key = jax.random.key(seed)
    item_bytes = jnp.dtype(dtype).itemsize
    total = sum(math.prod(param.shape) * item_bytes for param in leaves(params))
    done = 0

    def drawn(param: Param) -> jax.Array:
        # By name, so that a weight does not depend on which others the model has.
        own_key = jax.random.fold_in(key, zlib.crc32(param.sources[0].name.encode()))
        # One that is quantised on the host is drawn whole: a process has no other view of another's devices.
        is_whole = placement is None or is_grouped(param, quantize)
        draw = _draw(param.shape, param.dtype(dtype), None if placement is None or is_whole else placement(param))
        return draw(own_key, *_mean_and_spread(param))

    # The first of each shape; their programs are compiled in parallel.
    first = list({(param.shape, param.is_float32): param for param in reversed(leaves(params))}.values())
    with progress("Making random weights") as report, ThreadPoolExecutor() as pool:
        ready = dict(zip(map(id, first), pool.map(drawn, first), strict=True))

        def make(param: Param) -> Any:
            nonlocal done
            array = ready.pop(id(param)) if id(param) in ready else drawn(param)
            if is_grouped(param, quantize):
                weight = placed(quantized(np.asarray(array), param, placement), param, placement)
            elif has_channels(param, quantize):
                weight = channel_weight(array, param, quantize, placement)
            else:
                weight = param.plain(array)
            done += math.prod(param.shape) * item_bytes
            report(done, total)
            return for_kernels(weight, placement)

        return map_params(make, params)


def _mean_and_spread(param: Param) -> tuple[float, float]:
    source = param.sources[0]
    if len(source.shape) > 1:
        return 0.0, source.shape[-1] ** -0.5
    return (0.0, _BIAS_SPREAD) if source.name.endswith("bias") else (1.0, _NORM_SPREAD)


@cache  # layers repeat their shapes: one compilation each
def _draw(
    shape: tuple[int, ...], dtype: str, where: jax.sharding.Sharding | None
) -> Callable[[jax.Array, float, float], jax.Array]:
    # At most three axes: with four, compiling the draw takes seven times as long. Trailing ones are taken together,
    # which leaves a cut along any but the last in place.
    drawn = shape if len(shape) < 3 else (*shape[:2], math.prod(shape[2:]))

    @partial(jax.jit, out_shardings=where)
    def draw(key: jax.Array, mean: float, spread: float) -> jax.Array:
        values = mean + spread * jax.random.normal(key, drawn, jnp.float32)
        return values.astype(dtype).reshape(shape)

    return draw
