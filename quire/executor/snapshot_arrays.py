"""Snapshots, on the device, of the state that slots have beside pages."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from quire.executor.layer_state import SlotArrays
from quire.executor.shapes import Shapes
from quire.executor.step import State

STATE_SIZES = (1, 8)  # states of slots that one call can copy
SAVE, LOAD = "save_state", "load_state"  # kinds of programs

# Given a kind and a number of states: the number that one call copies, and the program.
Choose = Callable[[str, int], tuple[int, Callable[..., Any]]]
Pairs = Sequence[tuple[int, int]]  # of rows: the source, and the target


class Maker(Protocol):
    """Makes the arrays."""

    @property
    def shapes(self) -> Shapes: ...

    def empty_snapshots(self) -> list[SlotArrays]: ...


def copy_states(into: list[SlotArrays], source: list[SlotArrays], packed: jax.Array) -> list[SlotArrays]:
    """Rows [:, 1] of `into` overwritten by rows [:, 0] of `source`."""
    rows, targets = packed.T
    copied: list[SlotArrays] = jax.tree.map(lambda old, new: old.at[targets].set(new[rows]), into, source)
    return copied


class SnapshotArrays:
    """The arrays of the snapshots, like those of slots: a row for each number. Row 0, which no snapshot has, takes the
    copies of padding. Owned by the engine thread."""

    def __init__(self, choose: Choose, maker: Maker) -> None:
        self._choose = choose
        self._maker = maker
        self._padding = maker.shapes.num_slots  # the row of padding in the arrays of slots
        self.arrays: list[SlotArrays] = []

    def clear(self) -> None:
        self.close()  # frees the old ones first
        if self._maker.shapes.num_snapshots:
            self.arrays = self._maker.empty_snapshots()

    def close(self) -> None:
        self.arrays = []

    def save(self, state: State, pairs: Pairs) -> None:
        """The state of each slot goes to its snapshot."""
        while pairs:
            program, packed, pairs = self._next(SAVE, pairs, (self._padding, 0))
            self.arrays = program(self.arrays, state.slot_arrays, packed)

    def load(self, state: State, pairs: Pairs) -> State:
        """Each snapshot goes to its slot."""
        while pairs:
            program, packed, pairs = self._next(LOAD, pairs, (0, self._padding))
            state = state._replace(slot_arrays=program(state.slot_arrays, self.arrays, packed))
        return state

    def _next(self, kind: str, pairs: Pairs, padding: tuple[int, int]) -> tuple[Callable[..., Any], Any, Pairs]:
        """The next call, and the pairs after it."""
        size, program = self._choose(kind, len(pairs))
        part = pairs[:size]
        return program, np.array([*part, *[padding] * (size - len(part))], np.int32), pairs[size:]
