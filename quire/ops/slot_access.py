"""The tokens of a step by the slots whose state they continue."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.pages import Tiles


class SlotAccess(NamedTuple):
    """The places that a step's tokens read and write in arrays [slots + 1, ...].

    The tokens of a slot follow each other. Those of padding have the last row, and begin anew like those of a sequence
    that is computed from its first position on: so no state has to be zeroed when a slot starts.
    """

    slots: jax.Array  # int32 [t]
    positions: jax.Array  # int32 [t]; negative for padding
    within: jax.Array  # int32 [t]: tokens of the same slot before it in this step
    ends: jax.Array  # int32 [r]: the last token of each slot; [t], one behind all of them, for none
    tiles: Tiles

    @property
    def is_new(self) -> jax.Array:
        """bool [t]: its slot has no state before this step."""
        return self.positions <= self.within


def slot_access(slots: jax.Array, positions: jax.Array, tiles: Tiles, num_slots: int) -> SlotAccess:
    """`slots` and `positions` [t]; negative positions are padding. There are `num_slots` slots and one of padding."""
    count = len(slots)
    slots = jnp.where(positions < 0, num_slots, slots)
    token = jnp.arange(count, dtype=jnp.int32)
    changes = slots[1:] != slots[:-1]
    yes = jnp.ones(1, bool)
    begin = jax.lax.cummax(jnp.where(jnp.concatenate((yes, changes)), token, 0))
    is_end = jnp.concatenate((changes, yes)) & (positions >= 0)
    (ends,) = jnp.nonzero(is_end, size=min(count, num_slots), fill_value=count)
    return SlotAccess(slots, positions, token - begin, ends.astype(jnp.int32), tiles)
