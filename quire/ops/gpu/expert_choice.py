"""The choice of experts in one launch. XLA takes four or five to sort, gather and divide."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.expert_choice import Shares
from quire.ops.gpu.tiles import array, power_of_two, whole

LOWEST = -3.0e38  # of scores: above what is not there
MAX_CHOSEN = 16
RUN = 64  # scores that others are compared with at a time
EACH = 32  # comparisons of a thread at a time


def choose(
    scores: jax.Array, chosen: int, shares: Shares, is_real: jax.Array | None = None, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """An `ExpertChoice` for one NVIDIA GPU, of up to `MAX_CHOSEN`."""
    tokens = len(scores)
    operands = (scores,) if is_real is None else (scores, is_real.astype(jnp.int32))
    outputs = array((tokens, chosen), jnp.float32), array((tokens, chosen), jnp.int32)
    share, expert = pl.pallas_call(
        partial(_kernel, chosen, shares),
        grid=(tokens,),
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(output) for output in outputs],
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=_warps(scores.shape[1]), num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(*operands)
    return share, expert


def _warps(count: int) -> int:
    size = power_of_two(count)
    return max(1, min(16, min(RUN, size) * size // (32 * EACH)))


def _kernel(chosen: int, shares: Shares, scores_ref: Any, *refs: Any) -> None:
    """A score's place is the number of scores before it: few steps in sequence, where finding the highest score again
    and again takes many."""
    *real_refs, share_ref, expert_ref = refs
    row, count = pl.program_id(0), scores_ref.shape[1]
    source = row
    for real_ref in real_refs:
        source = jnp.where(real_ref[row] != 0, row, 0)
    size = power_of_two(count)
    run = min(RUN, size)
    number = jnp.arange(size)
    scores = _load_scores(scores_ref, source, number)
    place = jnp.zeros(size, jnp.int32)
    for first in range(0, count, run):
        other = first + jnp.arange(run)
        others = _load_scores(scores_ref, source, other)[:, None]
        is_before = (others > scores[None, :]) | ((others == scores[None, :]) & (other[:, None] < number[None, :]))
        place = place + is_before.astype(jnp.int32).sum(axis=0)
    is_chosen = place < chosen
    share = _shares(shares, scores, is_chosen, number < count)
    plgpu.store(share_ref.at[row, place], share, mask=is_chosen)
    plgpu.store(expert_ref.at[row, place], number, mask=is_chosen)


def _load_scores(scores_ref: Any, row: Any, number: jax.Array) -> jax.Array:
    """Below all others where there is none. One that is no number is among the lowest."""
    is_there = number < scores_ref.shape[1]
    scores = plgpu.load(scores_ref.at[row, number], mask=is_there, other=0.0)
    return jnp.where(is_there, jnp.where(scores > LOWEST, scores, LOWEST), -jnp.inf)


def _shares(shares: Shares, scores: jax.Array, is_chosen: jax.Array, is_there: jax.Array) -> jax.Array:
    """Of those that are chosen."""
    if shares is Shares.SCORES:
        return scores
    if shares is Shares.SIGMOIDS:
        return 1.0 / (1.0 + jnp.exp(-scores))
    weights = jnp.exp(scores - scores.max(axis=0))
    return weights / jnp.where(is_there if shares is Shares.OF_ALL else is_chosen, weights, 0.0).sum(axis=0)
