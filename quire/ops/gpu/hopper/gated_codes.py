"""Gates and ups of few rows, both in codes of e4m3, multiplied, gated and rounded to codes again in one launch.

As in `code_product`, a program reads all inputs of its outputs. Here these are gates and the ups that belong to them,
so that it has BLOCK finished numbers of each of the next product's rows. They get a scale of their own, so that no
program waits for another's largest number.

A thread has numbers of many rows, and few of each. They pass through shared memory, after which half a warp has a row.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.gpu.hopper.code_product import (
    FEWEST_ROWS,
    LEAST_AHEAD,
    MOST_AHEAD,
    MOST_ROWS,
    NARROW,
    in_shared,
    load,
)
from quire.ops.weights.rounded_rows import nearest_codes, row_scale

BLOCK = 128  # numbers of a row that have a scale
GROUPS = 2  # of threads
WIDE = BLOCK // GROUPS  # gates of a group, and ups
SHARED_BYTES = 224 << 10  # for blocks, and for the numbers that threads exchange
ALL_BUT_SIGN = 0x7FFFFFFF
# Half a warp has a row, eight numbers in each thread.
BY_ROW = plgpu.Layout.TILED(
    Tiling(((NARROW, BLOCK), (2, BLOCK), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


class GatedBlocks(NamedTuple):
    """`inputs` of each block, and how many have room at once."""

    inputs: int
    ahead: int


def gated_blocks_of(num_rows: int, numbers: int, inputs: int, dtype: Any) -> GatedBlocks | None:
    """For `numbers` gates and as many ups. None where the kernel does not apply."""
    if not FEWEST_ROWS <= num_rows <= MOST_ROWS or num_rows % NARROW or numbers % BLOCK:
        return None
    room = SHARED_BYTES - num_rows * BLOCK * jnp.dtype(dtype).itemsize
    for size in (512, 256, 128):
        ahead = room // ((2 * BLOCK + num_rows) * size)
        if inputs % size == 0 and ahead >= LEAST_AHEAD:
            return GatedBlocks(size, min(ahead, MOST_AHEAD, inputs // size))
    return None


def gated_codes(
    rows: jax.Array,
    row_scales: jax.Array,
    matrix: jax.Array,
    column_scales: jax.Array,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Codes [t, m] of silu(gate) * up, and their scales, float32 [m / BLOCK, t], of rows [t, inputs] with scales
    [t, 1] and a matrix [2 * m, inputs], gates first, with scales [2 * m]. They are rounded to `dtype` before, as in
    quire.ops.weights.rounded_rows."""
    (tokens, inputs), numbers = rows.shape, len(matrix) // 2
    blocks = gated_blocks_of(tokens, numbers, inputs, dtype)
    assert blocks is not None
    run = plgpu.kernel(
        partial(_kernel, blocks),
        out_type=(
            jax.ShapeDtypeStruct((tokens, numbers), rows.dtype),  # type: ignore[no-untyped-call]
            jax.ShapeDtypeStruct((numbers // BLOCK, tokens), jnp.float32),  # type: ignore[no-untyped-call]
        ),
        scratch_types=(
            plgpu.SMEM((tokens, BLOCK), dtype, transforms=in_shared(BLOCK, dtype)),
            plgpu.Barrier(num_arrivals=GROUPS),
        ),
        grid=(numbers // BLOCK,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="group",
        kernel_name="gated_codes",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, unsafe_no_auto_barriers=True
        ),
    )
    out: tuple[jax.Array, jax.Array] = run(rows, row_scales[:, 0], matrix, column_scales)
    return out


def _kernel(
    blocks: GatedBlocks,
    rows_ref: Any,
    row_scales_ref: Any,
    matrix_ref: Any,
    column_scales_ref: Any,
    codes_ref: Any,
    scales_ref: Any,
    active_ref: Any,
    all_there: Any,
) -> None:
    tokens, inputs = rows_ref.shape
    numbers = codes_ref.shape[1]
    size, ahead = blocks
    group, program = lax.axis_index("group"), lax.axis_index("program")
    start = program * BLOCK

    def add_block(_: Any, rows: Any, gates: Any, ups: Any, totals: tuple[jax.Array, jax.Array]) -> Any:
        def multiply(*sums: Any) -> tuple[jax.Array, ...]:
            for accumulator, matrix in zip(sums, (gates, ups), strict=True):
                plgpu.wgmma(accumulator, matrix.at[pl.ds(group * WIDE, WIDE)], rows.transpose((1, 0)))
            return tuple(accumulator[...] for accumulator in sums)

        sums = pl.run_scoped(multiply, *[plgpu.WGMMAAccumulatorRef((WIDE, tokens))] * 2)
        return tuple(map(jnp.add, totals, sums))

    def columns(first: Any) -> jax.Array:
        scales = column_scales_ref.at[pl.ds(first + start + group * WIDE, WIDE)]
        loaded = load(scales, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        return lax.broadcast_in_dim(loaded, (WIDE, tokens), (0,))

    def all_blocks(add_blocks: Any) -> None:
        of_rows = load(row_scales_ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        of_columns = [columns(first) for first in (0, numbers)]
        zeros = plgpu.layout_cast(jnp.zeros((WIDE, tokens), jnp.float32), plgpu.Layout.WGMMA)
        sums = add_blocks((zeros, zeros))
        by_row = lax.broadcast_in_dim(of_rows, (WIDE, tokens), (1,))
        gate, up = (total * by_row * scale for total, scale in zip(sums, of_columns, strict=True))
        active = (gate / (1.0 + jnp.exp(-gate)) * up).astype(active_ref.dtype)
        own = active_ref.at[:, pl.ds(group * WIDE, WIDE)].transpose((1, 0))
        own[...] = plgpu.layout_cast(active, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.barrier_arrive(all_there)
        plgpu.barrier_wait(all_there)
        _round(program, start, group, active_ref, codes_ref, scales_ref)

    def block(height: int) -> plgpu.BlockSpec:
        transforms = in_shared(size, rows_ref.dtype)
        return plgpu.BlockSpec((height, size), lambda index: (0, index), transforms=transforms, memory_space=plgpu.SMEM)

    plgpu.emit_pipeline_warp_specialized(
        add_block,
        grid=(inputs // size,),
        in_specs=[block(tokens), block(BLOCK), block(BLOCK)],
        memory_registers=40,
        wg_axis="group",
        num_compute_wgs=GROUPS,
        max_concurrent_steps=ahead,
        compute_context=all_blocks,
    )(rows_ref, *[matrix_ref.at[pl.ds(first + start, BLOCK)] for first in (0, numbers)])


def _round(program: Any, start: Any, group: Any, active_ref: Any, codes_ref: Any, scales_ref: Any) -> None:
    """Each group rounds half of the rows. If the eights of rows are odd in number, both store the middle eight."""
    tokens = len(codes_ref)
    count = -(-tokens // (GROUPS * NARROW)) * NARROW
    first = group * (tokens - count)
    loaded = load(active_ref.at[pl.ds(first, count)], layout=BY_ROW)
    active = loaded.astype(jnp.float32)
    # By their bits absolute values have their order, NaN above infinity.
    bits = lax.bitcast_convert_type(active, jnp.int32) & ALL_BUT_SIGN
    reach = lax.bitcast_convert_type(bits.max(1), jnp.float32)
    scale = row_scale(reach, codes_ref.dtype)
    inverse = lax.broadcast_in_dim(1.0 / scale, (count, BLOCK), (0,))
    codes_ref[pl.ds(first, count), pl.ds(start, BLOCK)] = nearest_codes(active * inverse, codes_ref.dtype)
    scales_ref[program, pl.ds(first, count)] = scale
