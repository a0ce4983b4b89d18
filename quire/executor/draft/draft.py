"""Guesses by a smaller model, the draft, that runs along with the served model.

Its keys and values are in the same pages: each page has arrays for the layers of both models, found through the page
table of the group that keeps all positions. So what happens to pages, copies, prefixes that are shared, preemption,
happens to both. Every forward pass runs the draft over the same tokens. What it computes decides which guesses are
made, and never a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quire.executor.launch import Ints
from quire.executor.sample.filters import asks_for_filters
from quire.executor.sample.sampler import COLDEST, Features, sample
from quire.executor.shapes import Shapes
from quire.executor.slots import FREQUENCY, NO_TOKEN, PRESENCE, REPETITION, TEMPERATURE, TOP_K
from quire.executor.step import Compiled, State, Weights, draft_hidden, with_page_entries
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.ops.pages import Tiles


class Draft(NamedTuple):
    """A model that guesses, and its weights."""

    model: Model
    weights: ParamTree


def num_packed(size: int, num_groups: int) -> int:
    """Integers of `pack_guesses` for `size` slots: their numbers, and an entry of the page table for each group."""
    return size * (1 + 4 * num_groups)


def guess_by_draft(compiled: Compiled, size: int, weights: Weights, state: State, packed: jax.Array) -> State:
    """The state with guesses behind the tokens of `size` slots: as many as there may be, one after the other.

    Each is drawn with the numbers with which the token in its place will be drawn, so that sampled tokens are guessed
    as well as the likeliest.
    """
    draft, shapes = compiled.draft, compiled.shapes
    assert draft is not None
    assert weights.draft is not None
    params, kernels = weights.draft, compiled.kernels
    slot, entries = packed[:size], packed[size:].reshape(4, -1)
    state = with_page_entries(state, *entries)
    slots = state.slots
    assert slots.lengths is not None
    first = jnp.where(slot == shapes.num_slots, -1, slots.lengths[slot] - 1)
    floats = slots.float_params[slot]
    asks = (floats[:, REPETITION] != 1) | (floats[:, FREQUENCY] != 0) | (floats[:, PRESENCE] != 0)
    cuts = asks_for_filters(slots.int_params[slot, TOP_K], floats) & (floats[:, TEMPERATURE] >= COLDEST)
    features = Features(
        filters=jnp.any(cuts & (first >= 0)),
        penalties=jnp.any(asks & (first >= 0)),
        adjustments=jnp.any(slots.adjusted[slot] != NO_TOKEN),
        masks=False,
        logprobs=False,
    )

    def guess(state: State, offset: jax.Array) -> tuple[State, None]:
        positions = jnp.where(first < 0, -1, first + offset)
        tiles = Tiles.single(slot, positions)
        state, hidden = draft_hidden(compiled, weights, state, slot, positions, tiles, kernels.decode_norms)
        at = jnp.maximum(positions, 0)
        logits = draft.model.logits(params, hidden)
        drawn = sample(logits, state.slots, slot, at, None, features, kernels=kernels.sampling)
        history = state.slots.history.at[slot, at + 1].set(jnp.maximum(drawn.tokens, 0))
        return state._replace(slots=state.slots._replace(history=history)), None

    after: State = jax.lax.scan(guess, state, jnp.arange(shapes.guesses, dtype=jnp.int32))[0]
    return after


def pack_guesses(slots: list[int], entries: list[tuple[int, int, int, int]], size: int, shapes: Shapes) -> Ints:
    """Slots, and the entries of page tables (slot, group, index, page) that the same step adds."""
    packed = np.zeros(num_packed(size, shapes.num_groups), np.int32)
    packed[:size] = shapes.num_slots
    packed[: len(slots)] = slots
    columns = packed[size:].reshape(4, -1)
    columns[0] = shapes.num_slots
    if entries:
        columns[:, : len(entries)] = np.array(entries, np.int32).T
    return packed
