"""Products of few rows with codes of four or eight bits on Hopper GPUs, in little more time than reading codes takes.

A group of 128 threads has a share of the outputs and of the inputs, and fetches blocks of codes, factors and rows ahead
into shared memory. Codes are widened in the registers from which the device multiplies them. The groups that share the
inputs of some outputs belong to one program, or to a cluster of programs that write into each other's memory. They add
their sums in a fixed order, and an epilogue (`row_epilogues`) makes the results of them.

Written in Pallas for Mosaic: Triton has no clusters, and fetches less ahead.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.gpu.hopper.cluster_sums import WARPS, Sources, begin_cluster
from quire.ops.gpu.hopper.code_fragments import OF_HALVES
from quire.ops.gpu.hopper.few_row_blocks import NARROW, RowBlocks, bytes_of_sums
from quire.ops.gpu.hopper.row_epilogues import Epilogue, finish
from quire.ops.gpu.hopper.row_factors import Squares
from quire.ops.gpu.hopper.row_fragments import COLUMNS, close_block


class Steps(Protocol):
    """Blocks of codes, `outputs` by `width` inputs: their storage and their product. Arrays have outputs as [pieces,
    outputs of each], and a block has as many of each piece."""

    @property
    def outputs(self) -> int: ...

    @property
    def width(self) -> int: ...

    def in_shared(self, places: int) -> list[Any]:
        """Shared memory for so many blocks of each array that is fetched."""

    def slices(self, arrays: Sequence[Any], start: Any, at: Any) -> list[Any]:
        """The block of each array from output `start` of each piece and input `at` on."""

    def add(self, arrays: Sequence[Any], rows: Any, sums: jax.Array) -> jax.Array:
        """`sums`, float32 [outputs, rows], plus the products of a block with rows; both are in shared memory."""

    def scales(self, arrays: Sequence[Any], start: Any) -> jax.Array | None:
        """A factor for the sums of each output, [outputs]; None: the sums include it."""

    @property
    def unit(self) -> float:
        """A factor for all sums."""


class Plan(NamedTuple):
    blocks: RowBlocks
    steps: Steps
    epilogue: Epilogue
    squares: Squares | None
    num_arrays: int  # that the steps read
    num_inputs: int  # that the epilogue reads


def few_row_product(
    x: jax.Array, arrays: Sequence[jax.Array], outputs: int, plan: Plan, *more: jax.Array
) -> tuple[jax.Array, ...]:
    """The epilogue's results for x [t, inputs], numbers of two bytes. `arrays`: those of the plan's steps. `more`: the
    squares, if the plan has them, and the epilogue's inputs."""
    blocks, steps, epilogue = plan.blocks, plan.steps, plan.epilogue
    tokens = max(len(x), NARROW)
    splits, groups, places = blocks.splits, blocks.groups, blocks.ahead * blocks.groups
    is_split: dict[str, Any] = {"cluster": (splits,), "cluster_names": ("split",)} if splits > 1 else {}
    in_shared = steps.in_shared(places)
    run = plgpu.kernel(
        partial(_kernel, plan),
        out_type=epilogue.results(x, outputs),
        grid=(outputs // blocks.outputs,),
        grid_names=("program",),
        **is_split,
        num_threads=groups,
        thread_name="group",
        kernel_name=f"few_rows_{type(epilogue).__name__.lower()}",
        scratch_types=[
            *in_shared,
            plgpu.SMEM((places, tokens, steps.width), x.dtype, transforms=OF_HALVES),
            plgpu.SMEM((max(1, bytes_of_sums(tokens, blocks.outputs, splits, groups) // 4),), jnp.float32),
            plgpu.SMEM((groups, WARPS * tokens), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + len(in_shared), num_barriers=places),
        ],
        # The kernel has its own barriers: JAX would put one before each copy of a block.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
    )
    out: tuple[jax.Array, ...] = run(x, *arrays, *more)
    return out


def _kernel(plan: Plan, x_ref: Any, *refs: Any) -> None:
    blocks, steps, epilogue = plan.blocks, plan.steps, plan.epilogue
    counts = plan.num_arrays, int(plan.squares is not None), plan.num_inputs
    ends = [sum(counts[: index + 1]) for index in range(3)]
    arrays, squares, inputs_of_epilogue = refs[: ends[0]], refs[ends[0] : ends[1]], refs[ends[1] : ends[2]]
    *results_and_codes, rows, parts, scratch, are_there = refs[ends[2] :]
    num_codes = len(steps.in_shared(1))
    results, codes = results_and_codes[:-num_codes], results_and_codes[-num_codes:]
    (_, tokens, width), (num_rows, inputs) = rows.shape, x_ref.shape
    sources = blocks.splits * blocks.groups
    count = ceil(inputs / (width * sources))
    program, group = lax.axis_index("program"), lax.axis_index("group")
    start, first = program * (blocks.outputs // epilogue.pieces), group * blocks.ahead  # of each piece
    source = group if blocks.splits == 1 else lax.axis_index("split") * blocks.groups + group
    if sources > 1:
        begin_cluster()

    def fetch(index: Any, place: Any) -> None:
        at = (source * count + index) * width
        # Rows beyond the last are zeros. The offset is not a constant, which would be checked against their number.
        some_rows = x_ref.at[pl.ds(0 * program, tokens), pl.ds(at, width)]
        for some, to in zip((*steps.slices(arrays, start, at), some_rows), (*codes, rows), strict=True):
            plgpu.copy_gmem_to_smem(some, to.at[place], are_there.at[place])

    def add(index: Any, sums: jax.Array) -> jax.Array:
        place = first + lax.rem(index, blocks.ahead)
        plgpu.barrier_wait(are_there.at[place])
        sums = steps.add([array.at[place] for array in codes], rows.at[place], sums)
        close_block()
        pl.when(index + blocks.ahead < count)(lambda: fetch(index + blocks.ahead, place))
        return sums

    for index in range(min(blocks.ahead, count)):
        fetch(index, first + index)
    # While the first blocks are on their way.
    loaded = epilogue.load(inputs_of_epilogue, start, (blocks.outputs, tokens), num_rows)
    scales = steps.scales(arrays, start)
    factors = [] if plan.squares is None else [plan.squares.factors(tokens)(squares[0], scratch.at[group])]
    zeros = plgpu.layout_cast(jnp.zeros((blocks.outputs, tokens), jnp.float32), plgpu.Layout.WGMMA)
    sums = lax.fori_loop(0, count, add, zeros) * steps.unit
    if scales is not None:
        sums = sums * lax.broadcast_in_dim(scales, sums.shape, (0,))
    places = epilogue.places(results, start, blocks.outputs)
    put = finish(
        epilogue,
        Sources(blocks.outputs, tokens // COLUMNS, blocks.splits, blocks.groups),
        num_rows,
        results[0].shape[1],
        has_factors=bool(factors),
        num_loaded=len(loaded),
        num_places=len(places),
    )
    put(sums, *factors, *loaded, parts, *places)
