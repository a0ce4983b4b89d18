"""The recurrence of layers with a matrix for each head, by the C++ kernel."""

import jax
import jax.numpy as jnp

from quire.ops.recurrence import Recurrence
from quire.ops.slot_access import SlotAccess


def recur(corrects: bool, tokens: Recurrence, matrices: jax.Array, access: SlotAccess) -> tuple[jax.Array, jax.Array]:
    """As `recur_in_tiles` in quire.ops.recurrence, for float32 on a CPU: token by token, so that it does not matter how
    a prompt is cut nor which tokens are beside it. The library must have been loaded."""
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
