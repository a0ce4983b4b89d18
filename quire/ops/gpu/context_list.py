"""Contexts of different lengths as a list of parts of about one length, of which each is the work of one program.

How long a part is depends on all the contexts of a step, so that few long ones fill a device as many short ones do.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Cut(NamedTuple):
    """The division of contexts into parts."""

    least: int  # positions of a part, unless its context has fewer
    programs: int  # that all contexts together are cut for


class ContextList(NamedTuple):
    """Parts [n] of the contexts of runs [r]. Parts behind the last have no positions.

    Parts of contexts that have several leave their results in places, those of one context side by side.
    """

    runs: jax.Array  # [n]
    begins: jax.Array  # [n]: positions
    ends: jax.Array  # [n]
    places: jax.Array  # [n]; what a part that is a whole context has here is not read
    counts: jax.Array  # [r]: parts of each context
    first_places: jax.Array  # [r]
    num_places: int


def whole_contexts(ends: jax.Array) -> ContextList:
    """A part for each."""
    runs = jnp.arange(len(ends), dtype=jnp.int32)
    return ContextList(runs, jnp.zeros_like(ends), ends, runs, (ends > 0).astype(jnp.int32), runs, 0)


def context_list(ends: jax.Array, block: int, cut: Cut) -> ContextList:
    """Of contexts that have so many positions, [r], cut at multiples of `block`."""
    count = len(ends)
    # One more, for what a sum in float32 may be wrong by. Contexts of one length become no more parts than there are
    # programs: a few parts more would wait for all others.
    least = jnp.maximum(cut.least, (ends.astype(jnp.float32).sum() / cut.programs).astype(jnp.int32) + 1)
    each = block * jnp.maximum(-(-ends // (block * jnp.maximum(ends // least, 1))), 1)
    counts = -(-ends // each)
    bounds, place_bounds = jnp.cumsum(counts), jnp.cumsum(jnp.where(counts > 1, counts, 0))
    numbers = jnp.arange(count + cut.programs, dtype=jnp.int32)
    runs = jnp.minimum(jnp.searchsorted(bounds, numbers, side="right", method="compare_all"), count - 1)
    within = numbers - (bounds - counts)[runs]
    is_real = numbers < bounds[-1]
    begins = jnp.where(is_real, within * each[runs], 0)
    first_places = place_bounds - counts
    return ContextList(
        runs.astype(jnp.int32),
        begins,
        jnp.where(is_real, jnp.minimum(begins + each[runs], ends[runs]), 0),
        first_places[runs] + within,
        counts,
        first_places,
        cut.programs,
    )
