"""Guesses the next tokens, and verifies the guesses.

A slot's length lives on the device, so that steps can be launched before the host knows how many guesses of the last
one were right. Guesses stand in a slot's history behind its length. A step computes them with the last token, draws the
token after each of them as it would be drawn without guesses, and keeps only the draws that follow right guesses: a
guess is right if it is the token that was drawn in its place.
"""

import jax
import jax.numpy as jnp

from quire.executor.launch import FROM_THE_LAST
from quire.executor.sample.sampler import Sampled
from quire.executor.slots import NO_TOKEN, Slots

LONGEST_MATCH = 3  # last tokens that an earlier place is searched for


def positions_of(positions: jax.Array, slot: jax.Array, slots: Slots) -> jax.Array:
    """Positions [n] in the slots [n]; those FROM_THE_LAST count from the last token."""
    if slots.lengths is None:
        return positions
    from_last = positions - FROM_THE_LAST + slots.lengths[slot] - 1
    return jnp.where(positions >= FROM_THE_LAST, from_last, positions)


def with_accepted(
    sampled: Sampled, samples: jax.Array, slots: Slots, slot: jax.Array, position: jax.Array, guesses: jax.Array
) -> tuple[Sampled, jax.Array]:
    """The tokens [n] that follow right guesses, NO_TOKEN in place of the others; and which they are.

    `guesses` [n] is the number of guesses before each token in its chunk. Tokens of a chunk are adjacent.
    """
    drawn_there = jnp.roll(sampled.tokens, 1)
    is_wrong = (guesses > 0) & (drawn_there != slots.history[slot, position])
    num_wrong = jnp.cumsum(is_wrong)
    is_kept = num_wrong == num_wrong[jnp.arange(len(guesses)) - guesses]
    return sampled._replace(tokens=jnp.where(is_kept, sampled.tokens, NO_TOKEN)), samples & is_kept


def guess_by_lookup(slots: Slots, packed: jax.Array, count: int) -> Slots:
    """The state with `count` guesses behind the tokens of the slots `packed` [n].

    They are the tokens that followed the last tokens the last time they stood there: as many of the last tokens as are
    found, up to LONGEST_MATCH. A repetition is continued as such.
    """
    assert slots.lengths is not None
    history, lengths = slots.history[packed], slots.lengths[packed, None]  # [n, max_tokens], [n, 1]
    at = jnp.arange(history.shape[1])
    matched, num_matched = at < lengths - 1, jnp.zeros(history.shape, jnp.int32)
    for back in range(LONGEST_MATCH):  # whether the tokens up to `at` end like the last ones
        last = jnp.take_along_axis(history, jnp.maximum(lengths - 1 - back, 0), axis=1)
        matched = matched & (at >= back) & (jnp.roll(history, back, axis=1) == last)
        num_matched += matched
    following = 1 + jnp.argmax(num_matched * history.shape[1] + jnp.where(at < lengths - 1, at, -1), axis=1)[:, None]
    offsets = jnp.arange(count)
    places = following + offsets % jnp.maximum(lengths - following, 1)
    guesses = jnp.take_along_axis(history, places, axis=1)
    return slots._replace(history=slots.history.at[packed[:, None], lengths + offsets].set(guesses))
