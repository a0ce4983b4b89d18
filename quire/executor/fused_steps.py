"""Programs that compute a step's tokens and sample those that follow, for sequences that ask for nothing else.

On a GPU starting a program takes the host about as long as a small model takes to compute a token, so that a step of
several programs would wait for the host.
"""

import jax
import jax.numpy as jnp

from quire.executor.draft.guesses import guess_by_lookup
from quire.executor.launch import fields
from quire.executor.programs.ladder import StepShape
from quire.executor.sample.sampler import Sampled
from quire.executor.step import (
    Compiled,
    State,
    Weights,
    hidden_of,
    next_tokens,
    shared_prefixes,
    tiles_of,
    with_new_pages,
    with_positions,
)
from quire.ops.pages import Tiles

MAX_VERIFIED = 64  # tokens: a step of more takes longer than starting its programs


def decode(
    compiled: Compiled, shape: StepShape, count: int, weights: Weights, state: State, packed: jax.Array
) -> tuple[State, Sampled]:
    """The next tokens of sequences, [count, rows]: up to `count` of each, one by one.

    A row that samples none is computed all the same: it is a part of a prompt, and the token after it is known.
    """
    inputs = with_positions(fields(packed, shape, compiled.shapes), state.slots)
    slot, num_new = inputs.slots, inputs.num_new
    state = with_new_pages(state, inputs)

    def one(state: State, offset: jax.Array) -> tuple[State, jax.Array]:
        positions = jnp.where(offset < jnp.maximum(num_new, 1), inputs.positions + offset, -1)
        positions = jnp.where(inputs.positions < 0, -1, positions)
        at = inputs._replace(positions=positions)
        tiles = Tiles.single(slot, positions, shared_prefixes(inputs))
        state, hidden = hidden_of(compiled, shape, weights, state, at, tiles)
        logits = compiled.model.logits(weights.model, hidden)
        kernels = compiled.kernels.sampling
        slots, sampled = next_tokens("plain", state.slots, logits, slot, positions, offset < num_new, kernels=kernels)
        return state._replace(slots=slots), sampled.tokens

    if count == 1:
        state, tokens = one(state, jnp.int32(0))
        return state, Sampled(tokens[None])
    state, tokens = jax.lax.scan(one, state, jnp.arange(count, dtype=jnp.int32))
    return state, Sampled(tokens)


def verify(
    compiled: Compiled, shape: StepShape, weights: Weights, state: State, packed: jax.Array
) -> tuple[State, Sampled]:
    """The tokens [tokens] after each of a step whose chunks are decodes or have guesses, which are looked up first.

    Tokens of one slot are adjacent: the last that is known, then its guesses. Every one is sampled after.
    """
    inputs = fields(packed, shape, compiled.shapes)
    slot, place = inputs.slots, jnp.arange(shape.tokens)
    is_first = (slot != jnp.roll(slot, 1)) | (place == 0)
    num_before = place - jax.lax.cummax(jnp.where(is_first, place, 0))  # guesses of the same slot
    is_guessing = (num_before == 1) & (inputs.positions >= 0)
    guessing = jnp.nonzero(is_guessing, size=max(1, shape.tokens // 2), fill_value=shape.tokens)[0]
    padding = compiled.shapes.num_slots
    guessing = jnp.append(slot, padding)[guessing]
    state = state._replace(slots=guess_by_lookup(state.slots, guessing, compiled.shapes.guesses))
    state = with_new_pages(state, inputs)
    inputs = with_positions(inputs, state.slots)
    state, hidden = hidden_of(compiled, shape, weights, state, inputs, tiles_of(compiled, shape, inputs))
    logits = compiled.model.logits(weights.model, hidden)
    kernels, samples = compiled.kernels.sampling, inputs.positions >= 0
    slots, sampled = next_tokens(
        "plain", state.slots, logits, slot, inputs.positions, samples, kernels=kernels, guesses=num_before
    )
    return state._replace(slots=slots), sampled
