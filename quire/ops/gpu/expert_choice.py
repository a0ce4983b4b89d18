"""The choice of experts in one launch, where XLA sorts, gathers and divides in four or five."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.expert_choice import Shares
from quire.ops.gpu.tiles import array, power_of_two, whole

LOWEST = -3.0e38  # of scores: above what is not there or is chosen already, so that none is chosen twice
MAX_CHOSEN = 16  # each takes two reductions


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
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(*operands)
    return share, expert


def _kernel(chosen: int, shares: Shares, scores_ref: Any, *refs: Any) -> None:
    *real_refs, share_ref, expert_ref = refs
    row, count = pl.program_id(0), scores_ref.shape[1]
    source = row
    for real_ref in real_refs:
        source = jnp.where(real_ref[row] != 0, row, 0)
    number, place = jnp.arange(power_of_two(count)), jnp.arange(power_of_two(chosen))
    scores = plgpu.load(scores_ref.at[source, number], mask=number < count, other=0.0)
    scores = jnp.where(scores > LOWEST, scores, LOWEST)  # what is no number too
    left = jnp.where(number < count, scores, -jnp.inf)
    best, expert = jnp.full(len(place), -jnp.inf), jnp.zeros(len(place), jnp.int32)
    for turn in range(chosen):
        highest = left.max(axis=0)
        first = jnp.where(left == highest, number, count).min(axis=0)
        left = jnp.where(number == first, -jnp.inf, left)
        best, expert = jnp.where(place == turn, highest, best), jnp.where(place == turn, first, expert)
    share = _shares(shares, best, scores, number < count)
    plgpu.store(share_ref.at[row, place], share, mask=place < chosen)
    plgpu.store(expert_ref.at[row, place], expert, mask=place < chosen)


def _shares(shares: Shares, best: jax.Array, scores: jax.Array, is_there: jax.Array) -> jax.Array:
    """Of the best scores, -inf behind the last of them; `scores` are all."""
    if shares is Shares.SCORES:
        return best
    if shares is Shares.SIGMOIDS:
        return 1.0 / (1.0 + jnp.exp(-best))
    weights = jnp.exp(best - best.max(axis=0))
    of_all = jnp.where(is_there, jnp.exp(scores - best.max(axis=0)), 0.0)
    return weights / (of_all if shares is Shares.OF_ALL else weights).sum(axis=0)
