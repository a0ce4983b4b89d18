"""The outputs that a block of experts' weights has: those of one part, or of gates and ups together."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Side(NamedTuple):
    """The outputs of a block, and the row of a matrix that each is."""

    part: Any  # a number, or one for each output: int32 [o]
    column: jax.Array  # int32 [o]: of its part
    is_output: jax.Array | None  # bool [o]; None: all are
    row: jax.Array  # int32 [o]: of all parts after each other

    @property
    def num_outputs(self) -> int:
        return len(self.column)


def sides_of(first: Any, columns: int, outputs: int, parts: int, *, joins: bool) -> list[Side]:
    """The columns from `first` on of each part, apart or as one block, the parts after each other."""
    if joins:
        number = jnp.arange(parts * columns)
        return [_side(jax.lax.div(number, columns), first + jax.lax.rem(number, columns), columns, outputs)]
    return [_side(part, first + jnp.arange(columns), columns, outputs) for part in range(parts)]


def _side(part: Any, column: jax.Array, columns: int, outputs: int) -> Side:
    return Side(part, column, None if outputs % columns == 0 else column < outputs, part * outputs + column)


def apart(sums: list[jax.Array], parts: int) -> list[jax.Array]:
    """The sums [outputs, rows] of each part; of a joined block they are taken from it."""
    if len(sums) == parts:
        return sums
    (joined,) = sums
    both = joined.reshape(parts, -1, joined.shape[1])
    number = jnp.arange(parts)[:, None, None]
    return [jnp.where(number == part, both, 0.0).sum(axis=0) for part in range(parts)]
