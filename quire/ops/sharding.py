"""The table from logical axes of weights and pages to axes of the device mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

# The mesh has this one axis. Keys and values, with the queries that read them, are independent of each other up to
# the projection that sums over them, and so are the features within a feed-forward block; a device has some of each.
TENSOR = "tensor"

MESH_AXES: dict[str, str | None] = {
    "vocab": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "embed": None,
    "experts": None,
}

# [num_pages, page_size, kv_heads, head_dim]
PAGE_AXES = (None, None, "kv_heads", None)
# [num_pages, kv_heads, page_size]: of the scales of pages in eight bits
PAGE_SCALE_AXES = (None, "kv_heads", None)


def tensor_mesh(devices: Sequence[jax.Device]) -> Mesh:
    # "Auto": the compiler propagates the shardings of the weights, so model files need not mention any.
    return jax.make_mesh((len(devices),), (TENSOR,), axis_types=(AxisType.Auto,), devices=devices)


def sharding(shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of an array with these logical axes; a dimension that the devices do not divide stays whole."""
    cut = []
    for length, axis in zip(shape, axes, strict=True):
        mesh_axis = None if axis is None else MESH_AXES[axis]
        cut.append(mesh_axis if mesh_axis is not None and length % mesh.shape[mesh_axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*cut))  # type: ignore[no-untyped-call]


def put(array: Any, where: Sharding | None) -> jax.Array:
    """An array of the host on its devices. Each process fills its own: to `device_put` onto the devices of several
    processes would be a collective for every array."""
    if where is None or where.is_fully_addressable:
        on_device: jax.Array = jax.device_put(array, where)
        return on_device
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def key_copies(kv_heads: int, group: int, num_devices: int) -> int:
    """Copies of each key and value head that give every device the same number of heads.

    1 if the heads suffice, or if no number of copies does it; then they stay whole.
    """
    copies = num_devices // kv_heads
    return copies if copies > 1 and num_devices % kv_heads == 0 and group % copies == 0 else 1
