"""Device memory: how much there is, and how much weights and steps take."""

import math
import os
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from quire.executor.shapes import Shapes
from quire.executor.step import SCORED_AT_ONCE
from quire.models.checkpoint import Quantize, leaves, weights_like
from quire.models.formats.quantized_source import QuantizedSource
from quire.models.model import Model
from quire.models.params import Param
from quire.ops.native import int8_product, library
from quire.ops.sharding import sharding
from quire.ops.weights.coded import experts_widened_bytes
from quire.ops.weights.int8 import quantized_row_bytes
from quire.ops.weights.weight import weights_of
from quire.settings.machine import memory_bytes
from quire.settings.resolve import MAX_RESERVED

FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX refuses both together
JAX_FRACTION = 0.75  # where none is set
SPARE_GIB = 8  # of pinned memory, for pages that are written before others are freed, and for transfers


def reserve_device_memory(pinned_gib: float = 0.0, fraction: float | None = None) -> None:
    """Give JAX this share of a GPU's memory, and no more than 94%, in place of its default, 75%: programs need little
    outside of JAX's arrays. And as much pinned host memory as its pages take, in place of 64 GB.

    Call it before JAX has looked for devices. The environment variables take precedence.
    """
    if not any(map(os.environ.get, FRACTION_VARIABLES)):
        wanted = fraction if fraction is not None and fraction > 0 else MAX_RESERVED  # others are refused by name later
        os.environ[FRACTION_VARIABLES[0]] = str(min(wanted, MAX_RESERVED))
    if 0 < pinned_gib < math.inf:  # others are refused by name later
        os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(math.ceil(pinned_gib) + SPARE_GIB))


def device_memory_bytes(device: jax.Device) -> int:
    """The memory that arrays on this device can have."""
    stats = device.memory_stats() or {}
    return int(stats.get("bytes_limit", 0)) or memory_bytes()


def reserved_fraction() -> float:
    """The share of a GPU's memory that JAX takes."""
    stated = filter(None, map(os.environ.get, FRACTION_VARIABLES))
    return float(next(stated, JAX_FRACTION))


def outside_bytes(device: jax.Device, is_shared: bool = False) -> int:
    """The memory of a GPU that is not JAX's: for programs, for the driver, and for processes that compile. Of a GPU
    that is shared with others, the same share of what this engine takes."""
    if device.platform != "gpu":
        return 0
    limit, fraction = device_memory_bytes(device), reserved_fraction()
    return int(limit / (max(fraction, MAX_RESERVED) if is_shared else fraction)) - limit


def compiling_environment() -> dict[str, str]:
    """Variables of processes that compile for the engine, which has taken the memory of its device. They need little.
    Their limit is that of the engine all the same: XLA lays programs out for it. They log errors only."""
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}


def weight_bytes(model: Model, dtype: str, quantize: str, mesh: Mesh | None, *, of_experts_alone: bool = False) -> int:
    """Bytes of the weights on one device, as they are without a quantised checkpoint."""
    total = 0
    for param in leaves(model.params()):
        if of_experts_alone and not param.is_of_experts:
            continue
        shape = param.shape if mesh is None else sharding(param.shape, param.axes, mesh).shard_shape(param.shape)
        quantized = quantize == "int8" and (param.num_contracted or param.is_of_experts)
        size = jnp.dtype(param.dtype(dtype)).itemsize
        total += prod(shape[:-1]) * (quantized_row_bytes(shape[-1]) if quantized else shape[-1] * size)
    return total


class WeightSizes(NamedTuple):
    """Bytes on one device."""

    num_bytes: int
    widened_bytes: int  # of the largest float copy that a product makes of a weight
    expert_bytes: int = 0  # of those, the experts'


def weight_sizes(
    model: Model,
    source: QuantizedSource | None,
    dtype: str,
    quantize: Quantize,
    mesh: Mesh | None,
    is_native: bool = False,
) -> WeightSizes:
    """The sizes of weights before they are read. `source`: the checkpoint, if quantised. `is_native`: products of
    codes are those of the native library, which makes no copies, where it has them."""
    is_grouped = quantize == "int8" and jax.default_backend() == "cpu"
    if is_grouped or (source is None and quantize == "none"):
        is_packed = not is_grouped or (mesh is None and int8_product.is_fast())
        experts = [param for param in leaves(model.params()) if param.is_of_experts and not is_packed]
        widened = max((experts_widened_bytes(param.shape) for param in experts), default=0)
        sizes = [weight_bytes(model, dtype, quantize, mesh, of_experts_alone=alone) for alone in (False, True)]
        return WeightSizes(sizes[0], widened, sizes[1])
    placement = None if mesh is None else lambda param: sharding(param.shape, param.axes, mesh)
    like = weights_like(model, source, dtype=dtype, quantize=quantize, placement=placement)

    def on_one(array: jax.ShapeDtypeStruct) -> int:
        shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
        return int(prod(shape) * array.dtype.itemsize)

    weights = weights_of(like)
    makes_copies = not is_native or not library.need("codes")
    of_experts = jax.tree.map(
        lambda param, weight: weight if param.is_of_experts else (),
        model.params(),
        like,
        is_leaf=lambda node: isinstance(node, Param),
    )
    return WeightSizes(
        sum(map(on_one, jax.tree.leaves(like))),
        max(weight.widened_bytes for weight in weights) if makes_copies else 0,
        sum(map(on_one, jax.tree.leaves(of_experts))),
    )


def largest_step_bytes(model: Model, shapes: Shapes) -> int:
    """An upper estimate of what the largest step needs besides weights and pages, before anything is compiled.

    Each token's widest intermediate and some of its hidden size, twice over, in float32 whatever the weights are; and
    the logits that are in memory together, in a few copies.
    """
    tokens = shapes.ladder.max_tokens
    samples = max(SCORED_AT_ONCE, shapes.num_slots)
    widest = max(prod(param.shape) // model.hidden_size for param in leaves(model.params()["layers"]))
    return tokens * 2 * (widest + 4 * model.hidden_size) * 4 + samples * model.vocab_size * 4 * 4
