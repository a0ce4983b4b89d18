"""Holds programs to the bits of a row: the same in every program, whatever the number of rows and their places.

That sums have one order is a property of our kernels, but only a habit of the libraries that XLA calls for products,
and of XLA's own sums. So where it is promised each program runs before it is used, with the same rows in many places,
and is refused where one has other bits than in the first program.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from quire.errors import InvalidSetting
from quire.executor.launch import NUM_FEATURES, Inputs, Ints, fields, num_sample_fields, num_single, padding
from quire.executor.programs.kinds import Key, Operand, Operands, in_words, kind_of, run
from quire.executor.programs.ladder import StepShape
from quire.executor.sample.sampler import NOTHING_ASKED
from quire.executor.shapes import Shapes
from quire.executor.slots import SEED_LOW, TEMPERATURE, TOP_P, Slots
from quire.executor.step import State
from quire.ops.pages import TILE
from quire.request import num_mask_words

NUM_DECODES = 4  # positions that decodes are compared at, each with one more key than the last
SEED = 20
TOP_PS = (0.9, 1.0)


class RowCheck:
    """The bits that the first programs gave the rows, and those programs. Owned by the engine's thread."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._checked: set[Key] = set()
        # By the name of what is compared, and the row.
        self._expected: dict[tuple[str, object], tuple[Key, bytes]] = {}

    def is_due(self, key: Key) -> bool:
        """True if this program computes rows and was not checked."""
        return self._shapes.fixed_order and kind_of(key).is_checked and key not in self._checked

    @property
    def num_checked(self) -> int:
        return len(self._checked)

    def run(self, key: Key, program: Callable[..., Any], state: State, operands: Operands) -> State:
        """Run the program on the padding slot, and raise InvalidSetting if a row has other bits than before."""
        run = self._run_sampling if kind_of(key).samples else self._run_step
        state = run(key, program, state, operands)
        self._checked.add(key)
        return state._replace(slots=_with_parameters(state.slots))

    def _run_step(self, shape: Any, program: Callable[..., Any], state: State, operands: Operands) -> State:
        steps = [step_of_decodes] if shape.decodes_only else [step_of_prompts, step_of_decodes]
        for make in steps[:1] if shape.scores else steps:  # which has no decodes
            packed = make(shape, self._shapes)
            state = state._replace(slots=_with_tokens(state.slots, operands.materials.compiled.model.vocab_size))
            state, computed = run(shape, program, state, operands, (packed,))
            into = fields(packed, shape, self._shapes)
            # Of a single key all kernels make the same.
            names = [(make is step_of_decodes and position > 0, position) for position in into.positions.tolist()]
            hidden = np.asarray(computed.hidden)
            if not (np.isfinite(hidden).all() and hidden.any()):
                raise InvalidSetting(f"reproducible: cannot be checked: {in_words(shape)} give zeros, or no numbers")
            self._compare("the last layer", shape, hidden, [names[end] for end in into.ends])
            if shape.scores:
                self._compare("log-probabilities of prompts", shape, computed.scored.logprobs, names)
                self._compare("the highest ones of prompts", shape, computed.scored.top_logprobs, names)
        return state

    def _run_sampling(self, key: Any, program: Callable[..., Any], state: State, operands: Operands) -> State:
        way, size = key
        for top_p in TOP_PS:
            hidden, packed, masks, positions = self._samples(operands, size, top_p)
            slots = _with_parameters(state.slots, temperature=1.0, top_p=top_p, seed=SEED)
            slots, sampled = program(operands.operand(Operand.HEAD), slots, hidden, packed, masks)
            state = state._replace(slots=slots)
            names = [(top_p, position) for position in positions]
            for column, what in enumerate(("logits", "filtered logits", "the sums of draws")):
                self._compare(what, key, np.asarray(sampled.checksums)[:, column], names)
            self._compare("the tokens", key, sampled.tokens, names)
            if way == "any":
                self._compare("log-probabilities", key, sampled.logprobs, names)
                self._compare("the highest log-probabilities", key, sampled.top_logprobs, names)
        return state

    def _samples(self, operands: Operands, size: int, top_p: float) -> tuple[Any, Ints, Any, list[int]]:
        """The same hidden vector in all places, drawn from at a few positions, of which nothing counts, with
        log-probabilities; and the positions."""
        shapes, model = self._shapes, operands.materials.compiled.model
        vector = jnp.cos(jnp.arange(model.hidden_size, dtype=jnp.float32)).astype(operands.materials.dtype)
        hidden = jnp.broadcast_to(vector, (shapes.num_samples, model.hidden_size))
        masks = jnp.full((size, num_mask_words(model.vocab_size)), 0xFFFFFFFF, jnp.uint32)
        packed = np.zeros(num_sample_fields(shapes.guesses > 0) * size + NUM_FEATURES, np.int32)
        packed[:size] = shapes.num_slots
        packed[size : 2 * size] = np.arange(size) % NUM_DECODES
        packed[-NUM_FEATURES:] = NOTHING_ASKED._replace(filters=top_p < 1, logprobs=True)
        return hidden, packed, masks, packed[size : 2 * size].tolist()

    def _compare(self, what: str, key: Key, rows: Any, names: Iterable[object]) -> None:
        found = [row.tobytes() for row in np.asarray(rows)]
        expected = [self._expected.setdefault((what, name), (key, row)) for row, name in zip(found, names, strict=True)]
        others = [first for row, (first, bits) in zip(found, expected, strict=True) if row != bits]
        if others:
            raise InvalidSetting(
                f"reproducible: in the program for {in_words(key)} {len(others)} of {len(found)} rows that should "
                f"be alike have other bits in {what} than in that for {in_words(others[0])}. A kernel, of XLA or "
                "of a library that it calls or one of ours, does not add in one order. Remedy: leave --reproducible "
                "out, or try another jax"
            )


def _with_tokens(slots: Slots, vocab_size: int) -> Slots:
    """Tokens from the middle of the vocabulary on in the padding slot: the first ones may have no embedding."""
    tokens = (vocab_size // 2 + np.arange(slots.history.shape[1], dtype=np.int32)) % vocab_size
    return slots._replace(history=slots.history.at[-1].set(tokens))


def _with_parameters(slots: Slots, temperature: float = 0.0, top_p: float = 0.0, seed: int = 0) -> Slots:
    """The padding slot samples like this. By default as in steps, where it is greedy: nothing is drawn for it."""
    floats = slots.float_params.at[-1, TEMPERATURE].set(temperature).at[-1, TOP_P].set(top_p)
    return slots._replace(float_params=floats, int_params=slots.int_params.at[-1, SEED_LOW].set(seed))


def step_of_prompts(shape: StepShape, shapes: Shapes) -> Ints:
    """A step with the padding slot's prompt in many places, and its first token as a decode in others.

    All tokens of a position write their keys and values to one place, and read them there: what the last one wrote
    counts for all. Nothing is padding, which would write where those of the first token are.
    """
    packed, into = _empty_step(shape, shapes)
    rows, _ = _tiles(into, shape, shapes)
    into.positions[rows:] = np.arange(shape.tokens - rows) % TILE
    _choose_ends(into, (0, NUM_DECODES - 1, TILE - 1))
    return packed


def step_of_decodes(shape: StepShape, shapes: Shapes) -> Ints:
    """A step with decodes at the first positions of the padding slot, each in many places.

    The tokens that are none have later positions, so that decodes read keys and values of decodes only.
    """
    packed, into = _empty_step(shape, shapes)
    rows = shape.tokens
    if not shape.decodes_only:
        rows, offsets = _tiles(into, shape, shapes)
        into.tile_starts[:rows] = np.arange(rows) % NUM_DECODES
        first = num_single(shape, shapes)
        into.tile_starts[first : first + len(offsets)] = NUM_DECODES
        behind = NUM_DECODES + np.arange(shape.tokens - rows) % TILE
        into.positions[rows:] = np.minimum(behind, shapes.page_size - 1)  # the slot has but one page
    into.positions[:rows] = np.arange(rows) % NUM_DECODES
    _choose_ends(into, range(NUM_DECODES))
    return packed


def _empty_step(shape: StepShape, shapes: Shapes) -> tuple[Ints, Inputs]:
    packed, into = padding(shape, shapes)
    into.positions.fill(0)
    return packed, into


def _tiles(into: Inputs, shape: StepShape, shapes: Shapes) -> tuple[int, Ints]:
    """Half of the single tokens that there can be, and tiles of all others: the number of the former, and where each
    tile begins."""
    first = num_single(shape, shapes)
    rows = first // 2
    offsets = np.arange(rows, shape.tokens, TILE, dtype=np.int32)
    into.tile_lengths[:rows] = 1
    into.tile_offsets[:rows] = np.arange(rows)
    into.tile_lengths[first : first + len(offsets)] = np.minimum(TILE, shape.tokens - offsets)
    into.tile_offsets[first : first + len(offsets)] = offsets
    return rows, offsets


def _choose_ends(into: Inputs, positions: Iterable[int]) -> None:
    """Take the hidden vectors of tokens with these positions, as many of each, from the first to the last."""
    groups = [np.flatnonzero(into.positions == position) for position in positions]
    groups = [group for group in groups if len(group)]
    for number, group in enumerate(groups):
        ends = into.ends[number :: len(groups)]
        ends[:] = group[np.linspace(0, len(group) - 1, len(ends)).astype(int)]
