"""Products of few rows with a matrix, both in codes of e4m3, at the speed of reading the matrix, on Hopper GPUs.

Outputs are the wide side of the device's products and rows the narrow one, so that 16 rows cost 16, not 64. A program
has all inputs of its outputs: one thread group keeps blocks of the matrix on their way, the others multiply. The device
adds products of e4m3 with about 14 bits, so the sums of each block are added to the others in float32.

Written in Pallas for Mosaic: Triton cannot keep as much of a matrix on its way.
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# For 8 rows XLA's widening of codes is as fast, and leaves rows as they are; for more than 64 the library's are.
FEWEST_ROWS, MOST_ROWS = 16, 64
NARROW = 8  # rows are a multiple of it: the narrow side of the device's products
WIDE = (64, 1), (64, 2), (128, 2)  # outputs of a group of threads, and groups
MULTIPROCESSORS = 132  # programs are as small as they can be and still run at once
SHARED_BYTES = 208 << 10  # for blocks
LEAST_AHEAD = 3  # blocks, the one that is multiplied among them
MOST_AHEAD = 12


class CodeBlocks(NamedTuple):
    """The work of a program: `groups` of threads with `outputs` each, over blocks of `inputs`."""

    outputs: int
    groups: int
    inputs: int
    ahead: int  # blocks that have room at once


def blocks_of(num_rows: int, outputs: int, inputs: int) -> CodeBlocks | None:
    """Those of a product; None: the kernel is not for it."""
    if not FEWEST_ROWS <= num_rows <= MOST_ROWS or num_rows % NARROW:
        return None
    possible = [(wide, groups) for wide, groups in WIDE if outputs % (wide * groups) == 0]
    at_once = [one for one in possible if outputs <= prod(one) * MULTIPROCESSORS]
    for wide, groups in (at_once or possible[::-1])[:1]:
        for size in (512, 256, 128):
            ahead = SHARED_BYTES // ((wide * groups + num_rows) * size)
            if inputs % size == 0 and ahead >= LEAST_AHEAD:
                return CodeBlocks(wide, groups, size, min(ahead, MOST_AHEAD, inputs // size))
    return None


def code_product(rows: jax.Array, matrix: jax.Array, dtype: Any) -> jax.Array:
    """Sums [t, outputs] of rows [t, inputs] times a matrix [outputs, inputs], for which there are blocks."""
    (tokens, inputs), outputs = rows.shape, len(matrix)
    blocks = blocks_of(tokens, outputs, inputs)
    assert blocks is not None
    run = plgpu.kernel(
        partial(_kernel, blocks),
        out_type=jax.ShapeDtypeStruct((tokens, outputs), dtype),  # type: ignore[no-untyped-call]
        grid=(outputs // (blocks.outputs * blocks.groups),),
        grid_names=("program",),
        num_threads=blocks.groups + 1,
        thread_name="group",
        kernel_name="code_product",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    out: jax.Array = run(rows, matrix)
    return out


def _kernel(blocks: CodeBlocks, rows_ref: Any, matrix_ref: Any, out_ref: Any) -> None:
    tokens, inputs = rows_ref.shape
    wide, groups, size, ahead = blocks
    group = lax.axis_index("group")
    start = lax.axis_index("program") * wide * groups
    row_bytes = plgpu.find_swizzle(8 * size)
    in_shared = (plgpu.TilingTransform((8, row_bytes)), plgpu.SwizzleTransform(row_bytes))

    def add_block(_: Any, rows: Any, matrix: Any, total: jax.Array) -> jax.Array:
        def multiply(sums: Any) -> Any:
            plgpu.wgmma(sums, matrix.at[pl.ds(group * wide, wide)], rows.transpose((1, 0)))
            return sums[...]

        sums: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((wide, tokens)))
        return total + sums

    def add_all(add_blocks: Any) -> None:
        zeros = jnp.zeros((wide, tokens), jnp.float32)
        sums = add_blocks(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)).astype(out_ref.dtype)
        own = out_ref.at[:, pl.ds(start + group * wide, wide)].transpose((1, 0))
        own[...] = plgpu.layout_cast(sums, plgpu.Layout.WGMMA_TRANSPOSED)

    def block(height: int) -> plgpu.BlockSpec:
        return plgpu.BlockSpec((height, size), lambda index: (0, index), transforms=in_shared, memory_space=plgpu.SMEM)

    plgpu.emit_pipeline_warp_specialized(
        add_block,  # type: ignore[arg-type]
        grid=(inputs // size,),
        in_specs=[block(tokens), block(wide * groups)],
        memory_registers=40,
        wg_axis="group",
        num_compute_wgs=groups,
        max_concurrent_steps=ahead,
        compute_context=add_all,
    )(rows_ref, matrix_ref.at[pl.ds(start, wide * groups)])
