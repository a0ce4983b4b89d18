"""Norms by the C++ kernels. A row's result does not depend on the other rows. The library must have been loaded."""

from math import prod

import jax
import numpy as np

from quire.ops.norms import Norms


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """As in quire.ops.norms, for float32 on a CPU."""
    size = prod(weight.shape)
    rows = x.reshape(-1, size)
    call = jax.ffi.ffi_call("quire_rms_norm", jax.ShapeDtypeStruct(rows.shape, rows.dtype))  # type: ignore[no-untyped-call]
    out: jax.Array = call(rows, weight.reshape(size), eps=np.float32(eps), offset=np.float32(offset))
    return out.reshape(x.shape)


def add_rms_norm(
    x: jax.Array, addend: jax.Array, weight: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """As in quire.ops.norms, for float32 on a CPU."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("quire_add_rms_norm", (like, like))
    total, normal = call(x, addend, weight, eps=np.float32(eps), offset=np.float32(offset))
    return total, normal


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """As in quire.ops.norms, for float32 on a CPU."""
    call = jax.ffi.ffi_call("quire_layer_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))  # type: ignore[no-untyped-call]
    out: jax.Array = call(x, weight, bias, eps=np.float32(eps))
    return out


NATIVE = Norms(rms_norm, add_rms_norm, layer_norm)
