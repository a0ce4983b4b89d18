"""Products of few rows with codes of four or eight bits on Hopper GPUs, in about the time that reading the codes takes.

A group of 128 threads has a share of the outputs and of the inputs, and keeps blocks of codes and rows on their way
into shared memory. Codes are widened in the registers from which the device multiplies them. The groups that share the
inputs of some outputs are those of a program, or of programs that are neighbours and write into each other's memory (a
cluster): they add their sums, in a fixed order, and round them to the type that is asked for.

Written in Pallas for Mosaic: Triton has no clusters, and keeps less on its way.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.gpu.cluster_sums import begin_cluster, store
from quire.ops.gpu.code_fragments import OF_HALVES, WIDE
from quire.ops.gpu.row_fragments import close_block

NARROW = 8  # rows are a multiple of it, or fewer: the narrow side of the device's products
MULTIPROCESSORS = 132
ENOUGH_BUSY = 0.7  # of the time that the multiprocessor with most to do takes
SHARED_BYTES = 220 << 10  # of a multiprocessor, for all its programs
MOST_PROGRAMS = 2  # that a multiprocessor should have at once
SPLITS = (1, 2, 4, 8)  # programs of a cluster
# Blocks of a group that are on their way at least, and steps of each, the best first.
DEPTHS = ((4, 8), (4, 4), (4, 2), (2, 8), (2, 4), (2, 2), (2, 1), (1, 1))
MOST_AHEAD = 8


class RowBlocks(NamedTuple):
    """The work of a program: `outputs`, and one of `splits` parts of the inputs, which its groups share, in blocks of
    `steps`."""

    outputs: int
    steps: int
    ahead: int  # blocks that have room at once, of each group
    splits: int
    groups: int


class Steps(Protocol):
    """The codes of a block, `outputs` by `width` inputs, and how they are multiplied."""

    @property
    def outputs(self) -> int: ...

    @property
    def width(self) -> int: ...

    def in_shared(self, ahead: int) -> list[Any]:
        """Room for blocks of each of the arrays that are fetched."""

    def slices(self, arrays: Sequence[Any], outputs: Any, inputs: Any) -> list[Any]:
        """The block of each of them that begins at such an output and input."""

    def add(self, arrays: Sequence[Any], rows: Any, sums: jax.Array) -> jax.Array:
        """float32 sums [outputs, rows] and the products of a block with rows, all in shared memory."""

    def factors(self, arrays: Sequence[Any], outputs: Any) -> jax.Array | float:
        """The factors of the sums [outputs] of a program."""


def splits_of(tiles: int, steps: int, least: float) -> int:
    """So few that multiprocessors have about as much to do each: else it is as long as for those with most."""

    def busy(splits: int) -> float:
        share = tiles * splits / MULTIPROCESSORS
        return share / ceil(share)

    possible = [splits for splits in SPLITS if steps % splits == 0]
    good = (one for one in possible if busy(one) >= ENOUGH_BUSY and tiles * one >= least)
    return next(good, max(possible, key=busy))


def blocks_of(
    num_rows: int, shape: tuple[int, int], step: int, splits: int, most_groups: int, block_bytes: Callable[[int], int]
) -> RowBlocks | None:
    """The best blocks that fit, for programs of as many groups or of one. `shape`: of the matrix; `step`: inputs of a
    step; `block_bytes`: of so many inputs, 0 of what cannot be a block."""
    outputs, inputs = shape
    programs = min(-(-outputs // WIDE * splits // MULTIPROCESSORS), MOST_PROGRAMS)  # of a multiprocessor at once
    for groups in dict.fromkeys((most_groups, 1)):
        room = SHARED_BYTES // programs // groups - (WIDE * num_rows * 4 if splits * groups > 1 else 0)
        for ahead, steps in DEPTHS:
            size, width = block_bytes(steps * step), steps * step * splits * groups
            fits = 0 if size == 0 or inputs % width else min(room // size, inputs // width)
            if fits >= ahead:
                return RowBlocks(WIDE, steps, min(fits, MOST_AHEAD), splits, groups)
    return None


def few_row_product(x: jax.Array, arrays: Sequence[jax.Array], steps: Steps, blocks: RowBlocks, like: Any) -> jax.Array:
    """`like` [t, outputs] of x [t, inputs], numbers of two bytes, and the arrays that `steps` knows."""
    tokens = max(len(x), NARROW)
    splits, groups, places = blocks.splits, blocks.groups, blocks.ahead * blocks.groups
    is_split: dict[str, Any] = {"cluster": (splits,), "cluster_names": ("split",)} if splits > 1 else {}
    run = plgpu.kernel(
        partial(_kernel, blocks, steps, len(arrays)),
        out_type=like,
        grid=(like.shape[1] // blocks.outputs,),
        grid_names=("program",),
        **is_split,
        num_threads=groups,
        thread_name="group",
        kernel_name="few_row_product",
        scratch_types=[
            plgpu.SMEM((places, tokens, steps.width), x.dtype, transforms=OF_HALVES),
            plgpu.SMEM((groups * blocks.outputs * tokens if splits * groups > 1 else 1,), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + len(steps.in_shared(places)), num_barriers=places),
            *steps.in_shared(places),
        ],
        # The kernel has its own barriers: those of JAX would be one before each of the copies of a block.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
    )
    out: jax.Array = run(x, *arrays)
    return out


def _kernel(blocks: RowBlocks, steps: Steps, num_arrays: int, x_ref: Any, *refs: Any) -> None:
    arrays, out_ref, (rows, parts, are_there, *codes) = refs[:num_arrays], refs[num_arrays], refs[num_arrays + 1 :]
    (_, tokens, width), inputs = rows.shape, x_ref.shape[1]
    sources = blocks.splits * blocks.groups
    count = inputs // width // sources
    program, group = lax.axis_index("program"), lax.axis_index("group")
    start = program * blocks.outputs
    source = group if blocks.splits == 1 else lax.axis_index("split") * blocks.groups + group
    if sources > 1:
        begin_cluster()

    def fetch(index: Any, place: Any) -> None:
        at = (source * count + index) * width
        # Rows that are not there are zeros. No known number: one would be held against the number of rows.
        given = x_ref.at[pl.ds(0 * program, tokens), pl.ds(at, width)]
        for some, to in zip((*steps.slices(arrays, start, at), given), (*codes, rows), strict=True):
            plgpu.copy_gmem_to_smem(some, to.at[place], are_there.at[place])

    def add_block(index: Any, sums: jax.Array) -> jax.Array:
        place = first + lax.rem(index, blocks.ahead)
        plgpu.barrier_wait(are_there.at[place])
        sums = steps.add([one.at[place] for one in codes], rows.at[place], sums)
        close_block()
        pl.when(index + blocks.ahead < count)(lambda: fetch(index + blocks.ahead, place))
        return sums

    first = group * blocks.ahead
    for index in range(min(blocks.ahead, count)):
        fetch(index, first + index)
    factors = steps.factors(arrays, start)
    zeros = plgpu.layout_cast(jnp.zeros((blocks.outputs, tokens), jnp.float32), plgpu.Layout.WGMMA)
    sums = lax.fori_loop(0, count, add_block, zeros)
    if not isinstance(factors, float):
        factors = lax.broadcast_in_dim(factors, sums.shape, (0,))
    put = store(blocks.outputs, blocks.splits, blocks.groups, out_ref.shape, out_ref.dtype)
    put(sums * factors, parts, out_ref.at[:, pl.ds(start, blocks.outputs)])
