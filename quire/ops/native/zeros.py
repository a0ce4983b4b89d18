"""Zeros by the C++ library: memory that is taken when it is first written."""

from functools import partial
from typing import Any

import jax


@partial(jax.jit, static_argnums=(0, 1))
def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """On the CPU. The library must have been loaded."""
    out: jax.Array = jax.ffi.ffi_call("quire_zeros", jax.ShapeDtypeStruct(shape, dtype))()  # type: ignore[no-untyped-call]
    return out
