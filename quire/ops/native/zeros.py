"""Zeros by the C++ library: memory that is taken when it is first written."""

from functools import partial
from typing import Any

import jax
import numpy as np


@partial(jax.jit, static_argnums=(0, 1))
def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros on the CPU. The library must have been loaded."""
    made = jax.ffi.ffi_call("quire_zeros", jax.ShapeDtypeStruct(shape, dtype))  # type: ignore[no-untyped-call]
    out: jax.Array = made(item_bytes=np.int64(np.dtype(dtype).itemsize))
    return out
