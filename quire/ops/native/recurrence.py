"""Recurrent layers by the C++ kernels: token by token, so that it does not matter how a prompt is cut nor which tokens
are beside it. All arrays are float32 on a CPU, and the library must have been loaded."""

import jax
import jax.numpy as jnp

from quire.ops.native.library import need
from quire.ops.recurrence import PLAIN, Recurrence, RecurrentKernels
from quire.ops.slot_access import SlotAccess


def convolve(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, inputs: jax.Array, access: SlotAccess
) -> tuple[jax.Array, jax.Array]:
    """As in quire.ops.recurrence."""
    if not need("recurrence"):
        return PLAIN.convolve(x, weight, bias, inputs, access)
    out = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (x, inputs)]  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("quire_convolve", out, input_output_aliases={5: 1})
    bias = jnp.zeros(weight.shape[:2], jnp.float32) if bias is None else bias
    found, inputs = call(x, weight, bias, access.slots, access.positions, inputs)
    return found, inputs


def recur(corrects: bool, tokens: Recurrence, matrices: jax.Array, access: SlotAccess) -> tuple[jax.Array, jax.Array]:
    """As `recur_in_tiles` in quire.ops.recurrence."""
    if not need("recurrence"):
        return PLAIN.recur(corrects, tokens, matrices, access)
    shapes = (tokens.v.shape, matrices.shape)
    out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("quire_recur", out, input_output_aliases={7: 1})
    factors = jnp.exp(tokens.decay)
    found, matrices = call(
        *(tokens.q, tokens.k, tokens.v, factors, tokens.rate),
        *(access.slots, access.positions, matrices),
        corrects=corrects,
    )
    return found, matrices


NATIVE = RecurrentKernels(convolve, recur)
