"""Products of few rows with a matrix, both in codes of e4m3, at the speed of reading the matrix, on Hopper GPUs.

Outputs are the wide side of the device's products and rows the narrow side, so that 16 rows cost 16, not 64. A program
reads all inputs of its outputs: one thread group fetches blocks of the matrix ahead, the others multiply. The device
adds products of e4m3 with about 14 bits, so the sums of each block are added in float32.

Written in Pallas for Mosaic: Triton cannot fetch as much of a matrix ahead.
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.gpu.hopper.mosaic import MULTIPROCESSORS

# For 8 rows XLA's widening of codes is as fast, and leaves rows as they are; for more than 64 the library's are.
FEWEST_ROWS, MOST_ROWS = 16, 64
NARROW = 8  # rows are a multiple of it: the narrow side of the device's products
WIDE = (64, 1), (64, 2), (128, 2)  # outputs of a group of threads, and groups
SHARED_BYTES = 208 << 10  # for blocks
LEAST_AHEAD = 3  # blocks, the current one included
MOST_AHEAD = 12
BLOCK = 128  # inputs that share a scale, where each row has several
SCALES_APART = 128  # bytes: where copies of scales may begin
load: Any = plgpu.load  # JAX 0.10 has other arguments


class CodeBlocks(NamedTuple):
    """The work of a program: `groups` of threads with `outputs` each, over blocks of `inputs`."""

    outputs: int
    groups: int
    inputs: int
    ahead: int  # blocks that have room at once


def blocks_of(num_rows: int, outputs: int, inputs: int, *, has_scales: bool = False) -> CodeBlocks | None:
    """None where the kernel does not apply. `has_scales`: rows have a scale for each BLOCK of inputs."""
    if not FEWEST_ROWS <= num_rows <= MOST_ROWS or num_rows % NARROW:
        return None
    possible = [(wide, groups) for wide, groups in WIDE if outputs % (wide * groups) == 0]
    # Programs are as small as they can be and still run at once.
    at_once = [tile for tile in possible if outputs <= prod(tile) * MULTIPROCESSORS]
    for wide, groups in (at_once or possible[::-1])[:1]:
        for size in (512, 256, 128):
            scale_bytes = 4 * num_rows * (size // BLOCK) * has_scales
            ahead = SHARED_BYTES // ((wide * groups + num_rows) * size + scale_bytes)
            if inputs % size == 0 and ahead >= LEAST_AHEAD and scale_bytes % SCALES_APART == 0:
                return CodeBlocks(wide, groups, size, min(ahead, MOST_AHEAD, inputs // size))
    return None


def in_shared(size: int, dtype: Any) -> tuple[Any, Any]:
    """The form in which blocks with `size` numbers of each row are in shared memory."""
    each = jnp.dtype(dtype).itemsize
    row_bytes = plgpu.find_swizzle(8 * each * size)
    return plgpu.TilingTransform((8, row_bytes // each)), plgpu.SwizzleTransform(row_bytes)


def code_product(
    rows: jax.Array,
    matrix: jax.Array,
    dtype: Any,
    scales: jax.Array | None = None,
) -> jax.Array:
    """Sums [t, outputs] of rows [t, inputs] times a matrix [outputs, inputs], for which there are blocks. `scales`:
    float32 [inputs / BLOCK, t], by which the sums of each BLOCK of inputs are multiplied before they are added."""
    (tokens, inputs), outputs = rows.shape, len(matrix)
    blocks = blocks_of(tokens, outputs, inputs, has_scales=scales is not None)
    assert blocks is not None
    run = plgpu.kernel(
        partial(_kernel, blocks),
        out_type=jax.ShapeDtypeStruct((tokens, outputs), dtype),  # type: ignore[no-untyped-call]
        grid=(outputs // (blocks.outputs * blocks.groups),),
        grid_names=("program",),
        num_threads=blocks.groups + 1,
        thread_name="group",
        kernel_name="code_product" if scales is None else "scaled_code_product",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=scales is not None
        ),
    )
    out: jax.Array = run(rows, matrix) if scales is None else run(rows, scales, matrix)
    return out


def _kernel(blocks: CodeBlocks, rows_ref: Any, *refs: Any) -> None:
    *scales_refs, matrix_ref, out_ref = refs
    tokens, inputs = rows_ref.shape
    wide, groups, size, ahead = blocks
    group = lax.axis_index("group")
    start = lax.axis_index("program") * wide * groups

    def add_block(_: Any, rows: Any, *given: Any) -> jax.Array:
        *scales, matrix, total = given
        own = matrix.at[pl.ds(group * wide, wide)]
        if scales:
            return _add_parts(rows, scales[0], own, total)

        def multiply(sums: Any) -> Any:
            plgpu.wgmma(sums, own, rows.transpose((1, 0)))
            return sums[...]

        sums: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((wide, tokens)))
        added: jax.Array = total + sums
        return added

    def add_all(add_blocks: Any) -> None:
        zeros = jnp.zeros((wide, tokens), jnp.float32)
        sums = add_blocks(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)).astype(out_ref.dtype)
        own = out_ref.at[:, pl.ds(start + group * wide, wide)].transpose((1, 0))
        own[...] = plgpu.layout_cast(sums, plgpu.Layout.WGMMA_TRANSPOSED)

    def block(height: int) -> plgpu.BlockSpec:
        transforms = in_shared(size, rows_ref.dtype)
        return plgpu.BlockSpec((height, size), lambda index: (0, index), transforms=transforms, memory_space=plgpu.SMEM)

    of_scales = plgpu.BlockSpec((size // BLOCK, tokens), lambda index: (index, 0), memory_space=plgpu.SMEM)
    plgpu.emit_pipeline_warp_specialized(
        add_block,  # type: ignore[arg-type]
        grid=(inputs // size,),
        in_specs=[block(tokens), *[of_scales for _ in scales_refs], block(wide * groups)],
        memory_registers=40,
        wg_axis="group",
        num_compute_wgs=groups,
        max_concurrent_steps=ahead,
        compute_context=add_all,
    )(rows_ref, *scales_refs, matrix_ref.at[pl.ds(start, wide * groups)])


def _add_parts(rows: Any, scales: Any, matrix: Any, total: Any) -> jax.Array:
    """The sums of each BLOCK times its scales, added to the others while the device multiplies the next."""
    (wide, tokens), count = total.shape, scales.shape[0]

    def multiply(started: list[Any]) -> Any:
        """Multiply the remaining parts, then add all of them."""
        if len(started) == count:
            return add(started)

        def start(sums: Any) -> Any:
            part = pl.ds(len(started) * BLOCK, BLOCK)
            plgpu.wgmma(sums, matrix.at[:, part], rows.at[:, part].transpose((1, 0)))
            return multiply([*started, sums])

        return pl.run_scoped(start, plgpu.WGMMAAccumulatorRef((wide, tokens)))

    def add(started: list[Any]) -> Any:
        sums = total
        for index, accumulator in enumerate(started):
            scale = load(scales.at[index], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            part = plgpu.wgmma_accumulator_load(accumulator, wait_n=count - 1 - index)
            sums = sums + part * lax.broadcast_in_dim(scale, (wide, tokens), (1,))
        return sums

    out: jax.Array = multiply([])
    return out
