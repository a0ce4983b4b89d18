"""Runs the programs of guesses, alone or in one with the step that verifies them."""

from collections.abc import Sequence, Set

import numpy as np

from quire.core.plan import Chunk, Kind, StepPlan
from quire.executor.draft.draft import pack_guesses
from quire.executor.launch import Packer
from quire.executor.programs.programs import Programs
from quire.executor.shapes import Shapes
from quire.executor.step import State

FUSED = frozenset((Kind.DECODE, Kind.VERIFY))


class GuessPrograms:
    """Owned by the executor."""

    def __init__(self, programs: Programs, shapes: Shapes) -> None:
        self._programs = programs
        self._shapes = shapes

    def fused(self, plan: StepPlan, special: Set[int]) -> tuple[str, int] | None:
        """The program that guesses for a step, computes it and samples, if there is one: for decodes and guesses of
        slots that ask for nothing but tokens."""
        chunks = plan.chunks
        if not chunks or chunks[-1].kind is not Kind.VERIFY or plan.guided:  # guesses come last
            return None
        for chunk in chunks:
            if chunk.kind not in FUSED or not chunk.samples or chunk.slot in special:
                return None
        return self._programs.verify(sum(chunk.length for chunk in chunks))

    def place(self, state: State, chunks: Sequence[Chunk], packer: Packer) -> State:
        """The state with guesses behind the tokens of the slots that have them verified."""
        verified = [chunk for chunk in chunks if chunk.kind is Kind.VERIFY]
        if not verified:
            return state
        slots = [chunk.slot for chunk in verified]
        size = next(size for size in self._programs.order.guess_sizes if size >= len(slots))
        guess = self._programs.get(("guess", size))
        if self._programs.has_draft:
            packed = pack_guesses(slots, packer.new_entries(verified), size, self._shapes)
            drafted: State = guess(self._programs.weights, state, packed)
            return drafted
        packed = np.full(size, self._shapes.num_slots, np.int32)
        packed[: len(slots)] = slots
        return state._replace(slots=guess(state.slots, packed))
