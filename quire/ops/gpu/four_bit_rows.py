"""Products of few rows with four-bit weights on Hopper GPUs, in little more time than reading the codes takes.

A group of 128 threads has a share of the outputs and of the inputs, and keeps blocks of codes, factors and rows on
their way into shared memory. Codes are widened in the registers from which the device multiplies them. The groups that
share the inputs of some outputs are those of a program, or of programs that are neighbours and write into each other's
memory (a cluster): they add their sums, in a fixed order, and round them to the type that is asked for.

Written in Pallas for Mosaic: Triton has no clusters, and keeps less on its way.
"""

from functools import partial
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.four_bits import PLACES, TILE, FourBits
from quire.ops.gpu.cluster_sums import begin_cluster, store
from quire.ops.gpu.code_fragments import OF_HALVES, WIDE
from quire.ops.gpu.four_bit_fragments import MOST_BY_WARP, FourBitSteps, add_block
from quire.ops.gpu.row_fragments import close_block

NARROW = 8  # rows are a multiple of it, or fewer: the narrow side of the device's products
MOST_ROWS = 64
MULTIPROCESSORS = 132
ENOUGH_BUSY = 0.7  # of the time that the multiprocessor with most to do takes
LEAST_BUSY, LEAST_BUSY_OF_MANY = 86, 118  # multiprocessors, for rows that warps multiply by themselves, and more
SHARED_BYTES = 220 << 10  # of a multiprocessor, for all its programs
MOST_PROGRAMS = 2  # that a multiprocessor should have at once
SPLITS = (1, 2, 4)  # programs of a cluster
# Blocks of a group that are on their way, at least, and steps of each: the best first.
DEPTHS = (4, 4), (2, 4), (4, 2), (2, 2), (2, 1), (1, 1)
DEPTHS_OF_MANY = (4, 4), (4, 2), (2, 4), (2, 2), (2, 1), (1, 1)
MOST_AHEAD = 8
MOST_STEPS = 1.15  # that are computed, of those that there are: beyond the last, codes, factors and rows are zeros


class RowBlocks(NamedTuple):
    """The work of a program: `outputs`, and one of `splits` parts of the inputs, which its groups of threads share, in
    blocks of `steps`."""

    outputs: int
    steps: int
    ahead: int  # blocks that have room at once, of each group
    splits: int
    groups: int


def blocks_of(num_rows: int, outputs: int, inputs: int, group: int, run: int) -> RowBlocks | None:
    """Those of a product; None: the kernel is not for it."""
    step, by_warp = PLACES * run, num_rows <= MOST_BY_WARP
    is_narrow = num_rows <= NARROW or num_rows % NARROW == 0
    if num_rows > MOST_ROWS or not is_narrow or outputs % WIDE or not (by_warp or group % step == 0):
        return None
    num_rows, num_steps = max(num_rows, NARROW), inputs // step
    is_tall = by_warp and outputs % (2 * WIDE) == 0 and outputs >= 2 * WIDE * MULTIPROCESSORS
    wide = 2 * WIDE if is_tall else WIDE
    splits = _splits(outputs // wide, num_steps, LEAST_BUSY if by_warp else LEAST_BUSY_OF_MANY)
    programs = min(-(-outputs // wide * splits // MULTIPROCESSORS), MOST_PROGRAMS)  # of a multiprocessor at once
    for groups in (2, 1) if by_warp and not is_tall else (1,):
        sources = splits * groups
        room = SHARED_BYTES // programs // groups - (wide * num_rows * 4 if sources > 1 else 0)
        for ahead, steps in DEPTHS if by_warp else DEPTHS_OF_MANY:
            width = steps * step
            if (group % width and width % group) or not _is_full(num_steps, steps * sources):
                continue
            found = min(room // _bytes_of(num_rows, wide, width, group), ceil(num_steps / (steps * sources)))
            if found >= ahead:
                return RowBlocks(wide, steps, min(found, MOST_AHEAD), splits, groups)
    return None


def _splits(tiles: int, num_steps: int, least: int) -> int:
    """So few that multiprocessors have about as much to do each: else it is as long as for those with most."""

    def busy(splits: int) -> float:
        share = tiles * splits / MULTIPROCESSORS
        return share / ceil(share)

    possible = [splits for splits in SPLITS if _is_full(num_steps, splits)]
    good = (one for one in possible if busy(one) >= ENOUGH_BUSY and tiles * one >= least)
    return next(good, max(possible, key=busy))


def _is_full(num_steps: int, at_once: int) -> bool:
    """True if steps in so many equal parts are few more than there are."""
    return ceil(num_steps / at_once) * at_once <= MOST_STEPS * num_steps


def _bytes_of(num_rows: int, outputs: int, width: int, group: int) -> int:
    """Shared memory of a block."""
    return width * (outputs // 2 + num_rows * 2) + max(1, width // group) * outputs * 4


@partial(jax.jit, static_argnums=(2, 3))
def four_bit_rows(x: jax.Array, weight: FourBits, blocks: RowBlocks, dtype: Any) -> jax.Array:
    """[t, outputs] in `dtype` of x [t, inputs], numbers of two bytes."""
    splits, groups, places = blocks.splits, blocks.groups, blocks.ahead * blocks.groups
    tokens, outputs = max(len(x), NARROW), weight.factors.shape[1]
    of_block = FourBitSteps(weight.run, weight.group, blocks.steps, blocks.outputs, x.dtype, weight.scale_dtype)
    is_split: dict[str, Any] = {"cluster": (splits,), "cluster_names": ("split",)} if splits > 1 else {}
    run = plgpu.kernel(
        partial(_kernel, blocks, of_block),
        out_type=jax.ShapeDtypeStruct((len(x), outputs), dtype),  # type: ignore[no-untyped-call]
        grid=(outputs // blocks.outputs,),
        grid_names=("program",),
        **is_split,
        num_threads=groups,
        thread_name="group",
        kernel_name="four_bit_rows",
        scratch_types=[
            plgpu.SMEM(
                (places, blocks.outputs // TILE, blocks.steps * TILE, weight.run),
                jnp.int16,
                transforms=of_block.of_codes,
            ),
            plgpu.SMEM((places, of_block.groups, blocks.outputs), jnp.int32),
            plgpu.SMEM((places, tokens, of_block.width), x.dtype, transforms=OF_HALVES),
            plgpu.SMEM((groups * blocks.outputs * tokens if splits * groups > 1 else 1,), jnp.float32),
            plgpu.Barrier(num_arrivals=3, num_barriers=places),
        ],
        # The kernel has its own barriers: those of JAX would be one before each of the copies of a block.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
    )
    out: jax.Array = run(x, weight.codes.reshape(len(weight.codes), -1, weight.run), weight.factors)
    return out


def _kernel(
    blocks: RowBlocks, steps: FourBitSteps, x_ref: Any, codes_ref: Any, factors_ref: Any, out_ref: Any, *shared: Any
) -> None:
    codes, factors, rows, parts, are_there = shared
    (_, tokens, width), inputs = rows.shape, x_ref.shape[1]
    sources = blocks.splits * blocks.groups
    count = ceil(inputs / (width * sources))
    program, group = lax.axis_index("program"), lax.axis_index("group")
    start, first = program * blocks.outputs, group * blocks.ahead
    source = group if blocks.splits == 1 else lax.axis_index("split") * blocks.groups + group
    if sources > 1:
        begin_cluster()

    def fetch(index: Any, place: Any) -> None:
        at = (source * count + index) * width
        tiles = pl.ds(lax.div(start, TILE), blocks.outputs // TILE)
        elements = pl.ds(lax.div(at, steps.size) * TILE, blocks.steps * TILE)
        groups = pl.ds(lax.div(at, steps.group), steps.groups)
        # Rows that are not there are zeros. No known number: one would be held against the number of rows.
        all_rows = pl.ds(0 * program, tokens)
        for given, to in (
            (codes_ref.at[tiles, elements], codes),
            (factors_ref.at[groups, pl.ds(start, blocks.outputs)], factors),
            (x_ref.at[all_rows, pl.ds(at, width)], rows),
        ):
            plgpu.copy_gmem_to_smem(given, to.at[place], are_there.at[place])

    def add(index: Any, sums: jax.Array) -> jax.Array:
        place = first + lax.rem(index, blocks.ahead)
        plgpu.barrier_wait(are_there.at[place])
        sums = add_block(steps, codes.at[place], factors.at[place], rows.at[place], sums)
        close_block()
        pl.when(index + blocks.ahead < count)(lambda: fetch(index + blocks.ahead, place))
        return sums

    for index in range(min(blocks.ahead, count)):
        fetch(index, first + index)
    zeros = plgpu.layout_cast(jnp.zeros((blocks.outputs, tokens), jnp.float32), plgpu.Layout.WGMMA)
    sums = lax.fori_loop(0, count, add, zeros) * steps.units.inverse
    put = store(blocks.outputs, blocks.splits, blocks.groups, out_ref.shape, out_ref.dtype)
    put(sums, parts, out_ref.at[:, pl.ds(start, blocks.outputs)])
