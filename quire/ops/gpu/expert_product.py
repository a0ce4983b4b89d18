"""Products of rows with the matrices of their experts, in one launch that reads each visited expert once.

A program multiplies a tile of rows of one expert by a block of its outputs. Rows stay where they are: a program finds
those of its expert, and writes their products where each belongs. With few tokens it looks through the choices of all,
so that nothing runs before the launch. With more, a table made before has the visits in the order of experts.
"""

from functools import partial
from itertools import product as pairs
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gates import ClampedGate, PlainGate, tanh_gelu
from quire.ops.gpu.expert_weights import (
    Side,
    WeightLayout,
    apart,
    arrays_of,
    layout_of,
    load_rows,
    load_scales,
    load_weights,
    sides_of,
)
from quire.ops.gpu.four_bit_steps import add_step, result
from quire.ops.gpu.tiles import array, least_dot, power_of_two, product, whole
from quire.ops.weights.experts import Gate
from quire.ops.weights.four_bit_experts import STEP

LEAST = 16  # on each side of a product of blocks
FEWEST_TOKENS = 8  # of a step
FEW_TOKENS = 64  # up to which programs look through the choices of all
MAX_ROWS = 128  # of a tile
COLUMNS = 64  # of a block for few rows; twice that for many
PROGRAMS = 384  # that occupy a device
FEW_INPUTS = 1024  # of which fewer blocks are on their way at a time
RUN = 1024  # visits that are compared with each other
ACTIVATIONS = (jax.nn.silu, jax.nn.relu, tanh_gelu)  # that Triton compiles; the exact gelu needs `erf`, which it lacks


class ExpertBlocks(NamedTuple):
    rows: int  # of a tile
    columns: int  # outputs of a block; with a gate, of each of both
    inputs: int
    warps: int
    stages: int
    is_of_steps: bool = False  # weights are widened in registers, which have the wide side
    joins_parts: bool = False  # gates and ups are one block, so that twice as many warps share them; needs a wide side

    @property
    def is_turned(self) -> bool:
        """True where rows are the narrow side of the device's products, of which the other is wide."""
        return self.is_of_steps or self.rows < COLUMNS


def blocks_of(expert: jax.Array, num_experts: int, outputs: int, layout: WeightLayout, *, gated: bool) -> ExpertBlocks:
    """The blocks for a weight of this layout; `outputs` after the gate."""
    tokens, chosen = expert.shape
    parts = 2 if gated else 1
    if tokens <= FEW_TOKENS:
        rows = least_dot(tokens)
        used = num_experts * (1.0 - (1.0 - min(1.0, chosen / num_experts)) ** tokens)  # that is likely
    else:
        rows = least_dot(min(MAX_ROWS, -(-3 * tokens * chosen // (2 * num_experts))))
        used = num_experts
    columns = COLUMNS * (2 if rows >= COLUMNS and tokens > FEW_TOKENS else 1) // parts
    while columns > 2 * LEAST // parts and used * outputs / columns < PROGRAMS:
        columns //= 2
    if jnp.dtype(layout.dtype).itemsize > 2:  # without tensor cores
        return ExpertBlocks(min(rows, 32) if tokens > FEW_TOKENS else rows, min(columns, 32), 32, 4, 2)
    if layout.is_stepped:  # each warp has outputs of its own, so that none widens what another does
        columns = columns if rows < COLUMNS else max(columns, COLUMNS)
        if tokens <= FEWEST_TOKENS and gated:
            return ExpertBlocks(rows, COLUMNS, STEP, 4, 4, is_of_steps=True, joins_parts=True)
        return ExpertBlocks(rows, columns, STEP, min(4, columns // LEAST), 4 if rows < COLUMNS else 3, is_of_steps=True)
    if tokens <= FEWEST_TOKENS and layout.group is None:  # most may be padding, so that few programs have work
        return ExpertBlocks(rows, columns, 64, 2 if gated else 4, 6 if gated or layout.inputs > FEW_INPUTS else 4)
    is_large = rows * columns * parts >= MAX_ROWS * MAX_ROWS
    block = (128 if rows < COLUMNS else 64) * layout.steps
    while block > 32 and not layout.is_paired and (layout.inputs % block or not layout.fits(block)):
        block //= 2
    return ExpertBlocks(rows, columns, block, 8 if is_large else 4, 3 if is_large else 4)


def expert_product(
    x: jax.Array,
    expert: jax.Array,
    weight: Any,
    bias: jax.Array | None = None,
    gate: Gate | None = None,
    *,
    blocks: ExpertBlocks | None = None,
    interpret: bool = False,
) -> jax.Array | None:
    """An `ExpertProduct` for one NVIDIA GPU."""
    if (layout := layout_of(x, weight, interpret)) is None or not compiles(gate):
        return None
    tokens, chosen = expert.shape
    parts = 1 if gate is None else 2
    matrices = arrays_of(layout, weight.rounded_visits(x, expert), weight, parts)
    num_experts = len(matrices[1])
    outputs = prod(weight.shape[1:-1]) // parts
    if blocks is None:
        blocks = blocks_of(expert, num_experts, outputs, layout, gated=gate is not None)
    if tokens <= FEW_TOKENS:
        find: Any = _rows_of_few
        places: tuple[jax.Array, ...] = (expert,)
        num_tiles = min(num_experts, tokens * chosen)
    else:
        find = _rows_of_tile
        places = tiles_of(expert, num_experts, blocks.rows)
        num_tiles = len(places[1])
    biases = () if bias is None else (bias.reshape(num_experts, parts, outputs),)
    operands = (*matrices, *biases, *places)
    out_shape = array((tokens, chosen, outputs), jnp.float32 if gate is None else x.dtype)
    out: jax.Array = pl.pallas_call(
        partial(
            _kernel, blocks, layout, gate, len(matrices), len(biases), partial(find, blocks.rows, num_experts, chosen)
        ),
        grid=(-(-outputs // blocks.columns), num_tiles),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(out_shape),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="expert_product",
    )(*operands)
    return out


def compiles(gate: Gate | None) -> bool:
    """True for gates that are known to be part of a kernel."""
    is_known = isinstance(gate, PlainGate) and gate.activation in ACTIVATIONS
    return gate is None or isinstance(gate, ClampedGate) or is_known


class ExpertTiles(NamedTuple):
    """The visits in the order of experts, and the part of them that each tile has. A tile has rows of one expert."""

    order: jax.Array  # int32 [visits]
    expert: jax.Array  # int32 [tiles]
    first: jax.Array  # int32 [tiles]: in `order`
    end: jax.Array  # int32 [tiles]: of the expert's visits; not after `first` for a tile without any


def tiles_of(expert: jax.Array, num_experts: int, rows: int) -> ExpertTiles:
    """Of choices [t, chosen]. Comparisons take one launch each, where cumulative sums and sorts take several."""
    visits = expert.reshape(-1)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    starts = jnp.sum(visits[None, :] < experts[:, None], axis=1, dtype=jnp.int32)
    ends = jnp.sum(visits[None, :] <= experts[:, None], axis=1, dtype=jnp.int32)
    tiles = (ends - starts + rows - 1) // rows
    before_end = jnp.sum(jnp.where(experts[None, :] <= experts[:, None], tiles[None, :], 0), axis=1)
    index = jnp.arange(len(visits) // rows + min(num_experts, len(visits)), dtype=jnp.int32)
    own = jnp.sum(before_end[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    is_there, own = own < num_experts, jnp.minimum(own, num_experts - 1)
    first = starts[own] + (index - (before_end - tiles)[own]) * rows
    return ExpertTiles(_in_order(visits, starts), own, first, jnp.where(is_there, ends[own], 0))


def _in_order(visits: jax.Array, starts: jax.Array) -> jax.Array:
    """The visits by expert, those of an expert in their order. Each is compared with the others of its run of visits,
    and runs with each other."""
    count, num_runs = len(visits), -(-len(visits) // RUN)
    runs = jnp.pad(visits, (0, num_runs * RUN - count)).reshape(num_runs, RUN)  # what is added comes last
    experts, run, at = (jnp.arange(size, dtype=jnp.int32) for size in (len(starts), num_runs, RUN))
    is_earlier = (runs[:, None, :] == runs[:, :, None]) & (at[None, :] < at[:, None])
    place = starts[visits] + jnp.sum(is_earlier, axis=2, dtype=jnp.int32).reshape(-1)[:count]
    if num_runs > 1:
        sizes = jnp.sum(runs[:, None, :] == experts[None, :, None], axis=2, dtype=jnp.int32)  # [runs, e]
        before = jnp.sum(jnp.where((run[None, :] < run[:, None])[:, :, None], sizes[None], 0), axis=1)
        place = place + before[jnp.arange(count) // RUN, visits]
    indices = jnp.arange(count, dtype=jnp.int32)
    return jnp.zeros(count, jnp.int32).at[place].set(indices, unique_indices=True)


class _Rows(NamedTuple):
    """The rows of a tile: tokens, and which of their choices the expert is."""

    expert: jax.Array  # []
    token: jax.Array  # [rows]
    choice: jax.Array  # [rows]
    is_there: jax.Array  # bool [rows]


def _rows_of_few(rows: int, num_experts: int, chosen: int, expert_ref: Any) -> _Rows:
    """All tokens are the rows of every tile, and the expert's own are there."""
    tokens, tile = expert_ref.shape[0], pl.program_id(1)
    if tokens == 1 and chosen <= num_experts:  # nothing to look for: the weights are asked for as soon as may be
        return _Rows(expert_ref[0, tile], jnp.arange(rows), jnp.full(rows, tile), jnp.arange(rows) == 0)
    token, choice = jnp.arange(rows)[:, None], jnp.arange(power_of_two(chosen))[None, :]
    choices = plgpu.load(expert_ref.at[token, choice], mask=(token < tokens) & (choice < chosen), other=-1)
    is_first = jnp.ones((), bool)
    if tokens * chosen <= num_experts:  # a tile is the first visit of its expert: the first token's begin at once
        expert = expert_ref[jax.lax.div(tile, chosen), jax.lax.rem(tile, chosen)]
        earlier = (choices == expert) & (token * chosen + choice < tile)
        is_first = earlier.astype(jnp.int32).max(axis=1).max(axis=0) == 0
    else:
        expert = tile
    own = choices == expert
    is_there = (own.astype(jnp.int32).max(axis=1) > 0) & is_first
    return _Rows(expert, jnp.arange(rows), jnp.where(own, choice, 0).sum(axis=1), is_there)


def _rows_of_tile(
    rows: int, num_experts: int, chosen: int, order_ref: Any, expert_ref: Any, first_ref: Any, end_ref: Any
) -> _Rows:
    tile = pl.program_id(1)
    at = first_ref[tile] + jnp.arange(rows)
    is_there = at < end_ref[tile]
    visit = plgpu.load(order_ref.at[at], mask=is_there, other=order_ref.shape[0])  # no row's place
    return _Rows(expert_ref[tile], jax.lax.div(visit, chosen), jax.lax.rem(visit, chosen), is_there)


def _kernel(
    blocks: ExpertBlocks,
    layout: WeightLayout,
    gate: Gate | None,
    num_matrices: int,
    num_biases: int,
    find: Any,
    *refs: Any,
) -> None:
    (x_ref, *weight_refs), others, out_ref = refs[:num_matrices], refs[num_matrices:-1], refs[-1]
    rows = find(*others[num_biases:])
    first = pl.program_id(0) * blocks.columns
    column = first + jnp.arange(blocks.columns)

    def compute() -> None:
        parts, outputs = 1 if gate is None else 2, out_ref.shape[2]
        is_output = None if outputs % blocks.columns == 0 else column < outputs
        sides = sides_of(first, blocks.columns, outputs, parts, joins=parts > 1 and blocks.joins_parts)
        add_up = _sums_of_steps if layout.is_stepped else _sums
        sums = apart(add_up(blocks, layout, sides, rows, x_ref, weight_refs), parts)
        for part, bias_ref in pairs(range(parts), others[:num_biases]):
            where = bias_ref.at[rows.expert, part, column]
            bias = plgpu.load(where) if is_output is None else plgpu.load(where, mask=is_output, other=0.0)
            sums[part] = sums[part] + _by_column(blocks, bias.astype(jnp.float32))
        if gate is None:
            (out,) = sums
        else:  # of numbers that are rounded as those that are written in between
            out = gate(*(part.astype(layout.dtype).astype(jnp.float32) for part in sums))
        _store(blocks, rows, column, is_output, out, out_ref)

    if x_ref.shape[0] == 1:  # a token visits all that it chooses
        compute()
    else:
        pl.when(rows.is_there.astype(jnp.int32).max(axis=0) > 0)(compute)


def _sums(
    blocks: ExpertBlocks, layout: WeightLayout, sides: list[Side], rows: _Rows, x_ref: Any, weight_refs: Any
) -> list[jax.Array]:
    """The products of a tile with each side: [rows, outputs], or turned."""
    width = weight_refs[0].shape[3]
    size = blocks.inputs // layout.steps
    choice = jnp.minimum(rows.choice, x_ref.shape[1] - 1)  # rows may be the same for all choices

    def scaled(sums: list[jax.Array], first: Any) -> list[jax.Array]:
        wheres = [(rows.expert, side.part, side.column) for side in sides]
        scales = [
            load_scales(layout, weight_refs, where, first, side.is_output)
            for where, side in zip(wheres, sides, strict=True)
        ]
        return [total if by is None else total * _by_column(blocks, by) for total, by in zip(sums, scales, strict=True)]

    def add(index: Any, sums: list[jax.Array]) -> list[jax.Array]:
        at = index * size + jnp.arange(size)
        real = None if width % size == 0 else (at < width)[None, :]
        x_mask = rows.is_there[:, None] if real is None else rows.is_there[:, None] & real
        x_mask = jnp.broadcast_to(x_mask, (blocks.rows, size))
        some = load_rows(layout, x_ref.at[rows.token[:, None], choice[:, None], at[None, :]], x_mask)
        added = []
        for side, sums_before in zip(sides, sums, strict=True):
            is_output = side.is_output
            mask = real if is_output is None else is_output[:, None] if real is None else is_output[:, None] & real
            mask = None if mask is None else jnp.broadcast_to(mask, (side.num_outputs, size))
            where = rows.expert, side.part, side.column
            total = jnp.zeros_like(sums_before) if layout.scales_blocks else sums_before
            for pair in zip(load_weights(layout, weight_refs, where, index * size, size, mask), some, strict=True):
                total = total + product(*(pair if blocks.is_turned else pair[::-1]), 1)
            added.append(total)
        if not layout.scales_blocks:
            return added
        return list(map(jnp.add, sums, scaled(added, index * blocks.inputs)))

    def shape(side: Side) -> tuple[int, int]:
        return (side.num_outputs, blocks.rows) if blocks.is_turned else (blocks.rows, side.num_outputs)

    sums = [jnp.zeros(shape(side), jnp.float32) for side in sides]
    sums = list(jax.lax.fori_loop(0, -(-width // size), add, sums))
    return scaled(sums, 0) if layout.is_scaled_once else sums


def _sums_of_steps(
    blocks: ExpertBlocks, layout: WeightLayout, sides: list[Side], rows: _Rows, x_ref: Any, weight_refs: Any
) -> list[jax.Array]:
    """The same, turned, with the arrays of `FourBitExperts`."""
    choice = jnp.minimum(rows.choice, x_ref.shape[1] - 1)
    where, refs = (rows.expert, rows.token, choice, rows.is_there), (x_ref, *weight_refs)
    own: Any = {"sides": sides, "refs": refs, "exact": layout.is_interpreted}
    sums = [jnp.zeros((side.num_outputs, blocks.rows), jnp.float32) for side in sides]
    num_steps = weight_refs[0].shape[2]
    sums = list(jax.lax.fori_loop(0, num_steps, partial(add_step, where=where, **own), sums))
    return result(sums, layout.dtype, layout.is_interpreted)


def _by_column(blocks: ExpertBlocks, numbers: jax.Array) -> jax.Array:
    return numbers[:, None] if blocks.is_turned else numbers[None, :]


def _store(
    blocks: ExpertBlocks, rows: _Rows, column: jax.Array, is_output: jax.Array | None, sums: jax.Array, out_ref: Any
) -> None:
    def across(of_rows: jax.Array, of_columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        if blocks.is_turned:
            return of_rows[None, :], of_columns[:, None]
        return of_rows[:, None], of_columns[None, :]

    token, outputs = across(rows.token, column)
    choice, _ = across(rows.choice, column)
    mask, within = across(rows.is_there, jnp.ones(blocks.columns, bool) if is_output is None else is_output)
    mask = jnp.broadcast_to(mask & within, sums.shape)
    plgpu.store(out_ref.at[token, choice, outputs], sums.astype(out_ref.dtype), mask=mask)
