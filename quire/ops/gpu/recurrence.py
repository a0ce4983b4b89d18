"""Single tokens of recurrent layers: the state of a row's slot is read once and written once, in its place.

XLA gathers the states of all rows, reads them again for every sum and scatters them. Here a program has some columns of
the matrix of one head in its registers. Columns do not depend on each other, so a row's bits depend neither on its
neighbours nor on their number.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array, load_masked, power_of_two, whole
from quire.ops.pages import Tiles
from quire.ops.recurrence import Recurrence
from quire.ops.slot_access import SlotAccess

CHANNELS = 512  # of a program of the convolution, at most


class Tiling(NamedTuple):
    block: int  # columns of a matrix that a program has, at most
    num_warps: int


TILING = Tiling(32, 4)  # for any number of rows, as other tilings add in another order


def recur_single(
    corrects: bool,
    tokens: Recurrence,
    matrices: jax.Array,
    tiles: Tiles,
    *,
    tiling: Tiling = TILING,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """A `RecurSingle` for one NVIDIA GPU."""
    heads, group, value_dim = tokens.v.shape[1:]
    block = min(tiling.block, power_of_two(value_dim))
    # XLA makes factors of decays together with the decays.
    of_tokens = tokens.q, tokens.k, tokens.v, jnp.exp(tokens.decay), tokens.rate
    single = tiles.part(0, tiles.num_single)
    operands = [single.slots, single.starts, single.lengths, *of_tokens, matrices]
    shapes = [array(tokens.v.shape, jnp.float32), array(matrices.shape, jnp.float32)]
    out, matrices = pl.pallas_call(
        partial(_recur, corrects, block),
        grid=(pl.cdiv(value_dim, block), heads * group, len(single)),  # the parts of a matrix run together
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=shapes,
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=1),
        interpret=interpret,
        name="recur_single",
    )(*operands)
    return out, matrices


def _recur(
    corrects: bool,
    block: int,
    slots_ref: Any,
    starts_ref: Any,
    lengths_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    factors_ref: Any,
    rates_ref: Any,
    before_ref: Any,
    out_ref: Any,
    matrices_ref: Any,
) -> None:
    row, head = pl.program_id(2), pl.program_id(1)
    group, key_dim, value_dim = matrices_ref.shape[2:]
    key_head, of_group = jax.lax.div(head, group), jax.lax.rem(head, group)
    key, column = jnp.arange(power_of_two(key_dim)), pl.program_id(0) * block + jnp.arange(block)
    is_key = None if len(key) == key_dim else key < key_dim
    is_column = None if value_dim % block == 0 else column < value_dim
    at_head, at_value = (row, key_head, of_group), (row, key_head, of_group, column)
    # All is loaded before anything waits for something else: of few rows, that is what takes the time.
    slot, start, length = (ref[row] for ref in (slots_ref, starts_ref, lengths_ref))
    q, k = (load_masked(ref, (row, key_head, key), is_key) for ref in (q_ref, k_ref))
    value, factor, rate = load_masked(v_ref, at_value, is_column), factors_ref[at_head], rates_ref[at_head]

    @pl.when(length > 0)
    def _() -> None:
        at = slot, key_head, of_group, key[:, None], column[None, :]
        is_there = jnp.broadcast_to(_both(is_key, is_column), (len(key), block))
        # A sequence begins with zeros, whatever its slot holds.
        matrix = plgpu.load(before_ref.at[at], mask=is_there & (start > 0), other=0.0) * factor
        taken = (matrix * k[:, None]).sum(axis=0) if corrects else 0.0
        matrix = matrix + k[:, None] * ((value - taken) * rate)[None, :]
        plgpu.store(matrices_ref.at[at], matrix, mask=is_there)
        plgpu.store(out_ref.at[at_value], (matrix * q[:, None]).sum(axis=0), mask=is_column)

    @pl.when(length <= 0)
    def _() -> None:
        plgpu.store(out_ref.at[at_value], jnp.zeros(block, jnp.float32), mask=is_column)


def _both(is_key: jax.Array | None, is_column: jax.Array | None) -> jax.Array:
    """bool [i, v], or of fewer axes."""
    there = jnp.ones((1, 1), bool) if is_key is None else is_key[:, None]
    return there if is_column is None else there & is_column[None, :]


def convolve_single(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    inputs: jax.Array,
    access: SlotAccess,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """A `ConvolveKernel` for one NVIDIA GPU, of steps of single tokens alone."""
    tiles, (tokens, heads, channels) = access.tiles, x.shape
    block = min(CHANNELS, power_of_two(channels))
    operands = [tiles.slots, tiles.starts, tiles.lengths, x, weight, *([] if bias is None else [bias]), inputs]
    shapes = [array(x.shape, jnp.float32), array(inputs.shape, inputs.dtype)]
    out, inputs = pl.pallas_call(
        partial(_convolve, block),
        grid=(pl.cdiv(channels, block), heads, tokens),
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=shapes,
        input_output_aliases={len(operands) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="convolve_single",
    )(*operands)
    return out, inputs


def _convolve(
    block: int, slots_ref: Any, starts_ref: Any, lengths_ref: Any, x_ref: Any, weight_ref: Any, *refs: Any
) -> None:
    *bias_refs, before_ref, out_ref, inputs_ref = refs
    row, head = pl.program_id(2), pl.program_id(1)
    channel, kept = pl.program_id(0) * block + jnp.arange(block), inputs_ref.shape[1]
    is_channel = channel < x_ref.shape[2]
    load = partial(plgpu.load, mask=is_channel, other=0.0)
    slot, start, length = (ref[row] for ref in (slots_ref, starts_ref, lengths_ref))
    x = load(x_ref.at[row, head, channel])
    weights = [load(weight_ref.at[head, channel, tap]).astype(jnp.float32) for tap in range(kept + 1)]
    biases = [load(ref.at[head, channel]).astype(jnp.float32) for ref in bias_refs]

    @pl.when(length > 0)
    def _() -> None:
        is_old = is_channel & (start > 0)
        inputs = [plgpu.load(before_ref.at[slot, at, head, channel], mask=is_old, other=0.0) for at in range(kept)]
        out = x.astype(jnp.float32) * weights[kept]
        for at in reversed(range(kept)):
            out += inputs[at].astype(jnp.float32) * weights[at]
        for at, new in enumerate([*inputs[1:], x.astype(inputs_ref.dtype)]):
            plgpu.store(inputs_ref.at[slot, at, head, channel], new, mask=is_channel)
        plgpu.store(out_ref.at[row, head, channel], sum(biases, out), mask=is_channel)

    @pl.when(length <= 0)
    def _() -> None:
        plgpu.store(out_ref.at[row, head, channel], jnp.zeros(block, jnp.float32), mask=is_channel)
