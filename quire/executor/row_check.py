"""Holds programs to the bits of a row: the same in every program, whatever the number of rows and their places.

That sums have one order is a property of our kernels, but only a habit of the libraries that XLA calls for products,
and of XLA's own sums. So where it is promised each program runs once before it is used, with the same row in many
places, and is refused where that has other bits than in the first program.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from quire.errors import InvalidSetting
from quire.executor.ladder import StepShape
from quire.executor.launch import NUM_FEATURES, Ints, fields, num_sample_fields, num_single, sizes
from quire.executor.padding import Operands
from quire.executor.program_table import Key
from quire.executor.sampler import NOTHING_ASKED
from quire.executor.shapes import Shapes
from quire.executor.step import State
from quire.ops.pages import TILE
from quire.request import num_mask_words

SAMPLING_KINDS = ("any", "filtered")


class RowCheck:
    """The bits that the first programs gave the row, and those programs. Owned by the engine's thread."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._checked: set[Key] = set()
        self._expected: dict[str, tuple[Key, bytes]] = {}  # by the name of what is compared

    def is_due(self, key: Key) -> bool:
        """True if this program computes rows and was not checked."""
        is_of_rows = isinstance(key, StepShape) or key[0] in SAMPLING_KINDS
        return self._shapes.fixed_order and is_of_rows and key not in self._checked

    def run(self, operands: Operands, program: Callable[..., Any], key: Key, state: State) -> State:
        """Run the program on the padding slot, and raise InvalidSetting if a row has other bits than before."""
        if isinstance(key, StepShape):
            state, computed = program(operands.weights, state, step_of_one_row(key, self._shapes))
            self._compare("the last layer", key, computed.hidden)
            self._checked.add(key)
            return state
        way, size = key
        hidden, packed, masks = self._samples(operands, size)
        slots, sampled = program(operands.compiler.head, state.slots, hidden, packed, masks)
        self._compare("the tokens", key, sampled.tokens)
        if way == "any":
            self._compare("log-probabilities", key, sampled.logprobs)
            self._compare("the highest log-probabilities", key, sampled.top_logprobs)
        self._checked.add(key)
        return state._replace(slots=slots)

    def _samples(self, operands: Operands, size: int) -> tuple[Any, Ints, Any]:
        """The same hidden vector in all places, of which nothing counts, with log-probabilities."""
        shapes, model = self._shapes, operands.model
        vector = jnp.cos(jnp.arange(model.hidden_size, dtype=jnp.float32)).astype(operands.compiler.dtype)
        hidden = jnp.broadcast_to(vector, (shapes.num_samples, model.hidden_size))
        masks = jnp.full((size, num_mask_words(model.vocab_size)), 0xFFFFFFFF, jnp.uint32)
        packed = np.zeros(num_sample_fields(shapes.guesses > 0) * size + NUM_FEATURES, np.int32)
        packed[:size] = shapes.num_slots
        packed[-NUM_FEATURES:] = NOTHING_ASKED._replace(logprobs=True)
        return hidden, packed, masks

    def _compare(self, what: str, key: Key, rows: Any) -> None:
        found = [row.tobytes() for row in np.asarray(rows)]
        first, expected = self._expected.setdefault(what, (key, found[0]))
        others = sum(row != expected for row in found)
        if others:
            raise InvalidSetting(
                f"reproducible: in the program for {_in_words(key)} {others} of {len(found)} rows that should be alike "
                f"have other bits in {what} than in that for {_in_words(first)}. This version of XLA, or of a library "
                "that it calls, does not add in one order. Remedy: leave --reproducible out, or try another jax"
            )


def step_of_one_row(shape: StepShape, shapes: Shapes) -> Ints:
    """A step with the first token of the padding slot in many places, as a decode and as the first of a prompt, and its
    hidden vectors.

    All of them write their keys and values to one place, and read them there: what the last one wrote counts for all.
    The places without it have later positions of that slot: padding would write where its keys and values are.
    """
    packed = np.zeros(sum(sizes(shape, shapes)), np.int32)
    into = fields(packed, shape, shapes)
    into.slots.fill(shapes.num_slots)
    into.page_slots.fill(shapes.num_slots)
    for numbers in (into.shared_tile_of, into.shared_tokens):
        numbers.fill(-1)
    if shape.decodes_only:
        at = np.arange(shape.tokens)
    else:
        first = num_single(shape, shapes)
        rows = first // 2
        offsets = np.arange(rows, shape.tokens, TILE)
        into.positions[rows:] = np.arange(shape.tokens - rows) % TILE
        into.tile_slots.fill(shapes.num_slots)
        into.tile_lengths[:rows] = 1
        into.tile_offsets[:rows] = np.arange(rows)
        into.tile_lengths[first : first + len(offsets)] = np.minimum(TILE, shape.tokens - offsets)
        into.tile_offsets[first : first + len(offsets)] = offsets
        at = np.concatenate([np.arange(rows), offsets])
    into.ends[:] = at[np.linspace(0, len(at) - 1, len(into.ends)).astype(int)]
    return packed


def _in_words(key: Key) -> str:
    return str(key) if isinstance(key, StepShape) else f"{key[1]} samples ({key[0]})"
