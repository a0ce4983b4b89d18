"""Filters of logits: top-k, top-p, min-p and typical-p.

Nothing is sorted. Cut-offs are found by halving the range of float32, which is as exact as a sort and treats equal
probabilities alike; or by a kernel.
"""

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp

from quire.executor.programs.branches import where_asked
from quire.executor.slots import MIN_P, TOP_P, TYPICAL_P
from quire.ops.sampling_kernels import FilterCuts


def filtered(
    logits: jax.Array, top_k: jax.Array, float_params: jax.Array, branches: bool = True, cuts: FilterCuts | None = None
) -> jax.Array:
    """Logits [r, v], with a maximum of 0, and -inf for what top-k, then top-p, then min-p, then typical-p leave out.

    Each search takes as long as all the rest together, so with `branches` it is made only when a row wants it. With
    `cuts`, a kernel, each row pays for what it wants.
    """
    size = logits.shape[1]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
    top_p, typical_p = _share(float_params[:, TOP_P]), _share(float_params[:, TYPICAL_P])
    if cuts is not None:
        logits, *limits = cuts(logits, k, top_p, float_params[:, MIN_P], typical_p)
        cut, centre, spread = (limit[:, None] for limit in limits)
        return jnp.where((logits >= cut) & (jnp.abs(-logits - centre) <= spread), logits, -jnp.inf)

    def wanted(rows: jax.Array) -> jax.Array | bool:
        return jnp.any(rows) if branches else True

    logits = where_asked(wanted(k < size), lambda x: _top_k(x, k), logits)
    logits = where_asked(wanted(top_p < 1), lambda x: _top_p(x, top_p), logits)
    # The highest is always left, so that its probability is the measure of the others' after every cut.
    logits = jnp.where(logits >= jnp.log(float_params[:, MIN_P, None]), logits, -jnp.inf)
    return where_asked(wanted(typical_p < 1), lambda x: _typical_p(x, typical_p), logits)


def asks_for_filters(top_k: jax.Array, float_params: jax.Array) -> jax.Array:
    """The rows for which `filtered` leaves anything out."""
    shares = (_share(float_params[:, column]) < 1 for column in (TOP_P, TYPICAL_P))
    return reduce(jnp.logical_or, shares, (top_k > 0) | (float_params[:, MIN_P] > 0))


def _share(asked: jax.Array) -> jax.Array:
    """The requested share; 1 for rows of padding, which have 0."""
    return jnp.where(asked > 0, asked, 1.0)


def _top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    ranks = _ordered(logits)
    cut = _largest(lambda least: (ranks >= least[:, None]).sum(axis=-1) >= k, logits.shape[0])
    return jnp.where((ranks >= cut[:, None]) | (k == logits.shape[1])[:, None], logits, -jnp.inf)


def _top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    probabilities = jax.nn.softmax(logits, axis=-1)
    return jnp.where(_nucleus(probabilities, probabilities, top_p), logits, -jnp.inf)


def _typical_p(logits: jax.Array, typical_p: jax.Array) -> jax.Array:
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    probabilities = jnp.exp(logprobs)
    entropy = -jnp.where(probabilities > 0, probabilities * logprobs, 0.0).sum(axis=-1, keepdims=True)
    typicality = -jnp.abs(-logprobs - entropy)
    return jnp.where(_nucleus(probabilities, typicality, typical_p), logits, -jnp.inf)


def _nucleus(probabilities: jax.Array, values: jax.Array, mass: jax.Array) -> jax.Array:
    """The tokens that have the highest values and this mass together, with all that are level with the last of them."""
    ranks = _ordered(values)
    cut = _largest(
        lambda least: jnp.where(ranks >= least[:, None], probabilities, 0.0).sum(axis=-1) >= mass, values.shape[0]
    )
    return (ranks >= cut[:, None]) | (mass >= 1)[:, None]


def _ordered(values: jax.Array) -> jax.Array:
    """int32 that sort as the floats do; the two zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values).astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _largest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """For each row the largest int32 for which `holds` is true, where it is true for all smaller ones too."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # The middle, rounded up, without overflow.
        middle = (low >> 1) + (high >> 1) + ((low & 1) | (high & 1))
        true = holds(middle)
        return jnp.where(true, middle, low), jnp.where(true, high, middle - 1)

    bounds = jnp.full(rows, -(2**31), jnp.int32), jnp.full(rows, 2**31 - 1, jnp.int32)
    low: jax.Array = jax.lax.fori_loop(0, 32, halve, bounds)[0]
    return low
