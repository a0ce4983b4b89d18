"""What a model and its steps take of a device's memory."""

import os
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from quire.executor.shapes import Shapes
from quire.executor.step import SCORED_AT_ONCE
from quire.models.checkpoint import leaves
from quire.models.model import Model
from quire.ops.quantized import quantized_row_bytes
from quire.sharding import sharding


def reserve_device_memory() -> None:
    """Let JAX have nearly all of a GPU, of which it would leave a quarter: programs need little outside of its arrays.

    It has to be called before JAX has looked for devices; what the environment says comes first.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")


def device_memory_bytes(device: jax.Device) -> int:
    """All of the memory that arrays on this device can have."""
    stats = device.memory_stats() or {}
    return int(stats.get("bytes_limit", 0)) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def weight_bytes(model: Model, dtype: str, quantize: str, mesh: Mesh | None) -> int:
    """Of the weights, on one device."""
    size = jnp.dtype(dtype).itemsize
    total = 0
    for param in leaves(model.params()):
        shape = param.shape if mesh is None else sharding(param.shape, param.axes, mesh).shard_shape(param.shape)
        quantized = quantize == "int8" and param.summed
        total += prod(shape[:-1]) * (quantized_row_bytes(shape[-1]) if quantized else shape[-1] * size)
    return total


def largest_step_bytes(model: Model, shapes: Shapes) -> int:
    """An upper estimate of what the largest step needs besides weights and pages, before anything is compiled.

    Each token's widest intermediate and some of its hidden size, twice over, in float32 whatever the weights are; and
    the logits that are in memory together, in a few copies.
    """
    buckets = shapes.buckets.all()
    tokens = max(bucket.num_tokens for bucket in buckets)
    samples = max(SCORED_AT_ONCE, *(bucket.num_samples for bucket in buckets))
    widest = max(prod(param.shape) // model.hidden_size for param in leaves(model.params()["layers"]))
    return tokens * 2 * (widest + 4 * model.hidden_size) * 4 + samples * model.vocab_size * 4 * 4
