"""Arrays of numbers as messages have them."""

from math import prod
from typing import Any

import numpy as np

from quire.group.messages import Array

HostArray = np.ndarray[Any, np.dtype[Any]]

DTYPES = {name: np.dtype(name) for name in ("int32", "uint32", "float32", "bool")}


def to_message(array: HostArray | None) -> Array | None:
    return None if array is None else Array(array.dtype.name, list(array.shape), array.tobytes())


def from_message(message: Array | None) -> HostArray | None:
    """Raises ValueError where the bytes are not those of such an array."""
    if message is None:
        return None
    if message.dtype not in DTYPES or any(length < 0 for length in message.shape):
        raise ValueError(
            f"an array of {message.dtype} {message.shape}; dtypes are {', '.join(DTYPES)}, lengths at least 0"
        )
    dtype = DTYPES[message.dtype]
    if prod(message.shape) * dtype.itemsize != len(message.data):
        raise ValueError(f"an array of {message.dtype} {message.shape} has {len(message.data)} bytes")
    return np.frombuffer(message.data, dtype).reshape(message.shape)
