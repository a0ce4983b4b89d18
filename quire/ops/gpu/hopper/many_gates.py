"""Gates and ups of 200 to 256 rows of decodes, both in codes of e4m3, multiplied and gated in one launch.

Rows are the wide side of the device's products. They are two tiles of two groups of 64 rows each; groups overlap where
there are fewer than 256 rows, and compute the same bits for rows that they share. A cluster of two programs has one
tile each and the same part of the matrix (some gates, and the ups that belong to them), which they fetch together: what
a multiprocessor can ask of the second cache is a limit. Then it takes another part, whose blocks come while it gates.
Parts have such a size that all multiprocessors have about as much to do.

A warp of one more group of threads keeps blocks on their way. The device adds the products of all inputs, as in the
library's products of so many rows. Results are numbers, not codes: the next product takes one scale for each row.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.gpu.hopper.code_fragments import by_warp
from quire.ops.gpu.hopper.code_product import NARROW, in_shared, load
from quire.ops.gpu.hopper.mosaic import MULTIPROCESSORS

FEWEST_ROWS, MOST_ROWS = 200, 256  # with fewer, the library's product and a gate after it are within 1 %
TILES = 2  # programs of a cluster
GROUPS = 2  # of threads that compute, for each tile
WIDE = 64  # rows of a group
SIZE = 128  # inputs of a block
PARTS = 128, 112, 96  # gates; two accumulators of the device have 256 columns at most
SHARED_BYTES = 224 << 10
ALIGNED = 1024  # bytes: where arrays in shared memory begin
LEAST_AHEAD, MOST_AHEAD = 3, 6
FETCHING_REGISTERS, COMPUTING_REGISTERS = 32, 232  # of a thread
TILE = "tile"  # the axis of the programs of a cluster


class GateBlocks(NamedTuple):
    height: int  # rows of a tile
    part: int  # gates that a cluster has at a time
    ahead: int  # blocks that have room at once

    def clusters(self, numbers: int) -> int:
        """Clusters that run at once."""
        return min(numbers // self.part, MULTIPROCESSORS // TILES)

    def most_gates(self, numbers: int) -> int:
        """Gates of the cluster that has most to do."""
        return self.part * -(-(numbers // self.part) // self.clusters(numbers))


def gate_blocks_of(num_rows: int, numbers: int, inputs: int) -> GateBlocks | None:
    """None: the kernel is not for it."""
    if not FEWEST_ROWS <= num_rows <= MOST_ROWS or num_rows % NARROW or inputs % SIZE:
        return None
    height = -(-num_rows // (TILES * NARROW)) * NARROW
    possible = []
    for part in PARTS:
        ahead = min(blocks_with_room(height, part), inputs // SIZE)
        if numbers % part == 0 and ahead >= LEAST_AHEAD:
            possible.append(GateBlocks(height, part, ahead))
    return min(possible, key=lambda blocks: blocks.most_gates(numbers), default=None)  # of equals the largest part


def blocks_with_room(height: int, part: int) -> int:
    others = GROUPS * WIDE * store_width(part) * 2 + ALIGNED + 16 * part
    return min(MOST_AHEAD, (SHARED_BYTES - others) // ((height + 2 * part) * SIZE))


def store_width(part: int) -> int:
    """Gates of a row that leave together: half of a part, where its rows of shared memory are multiples of 32 bytes."""
    return part // 2 if part % 32 == 0 else part


def gated(
    rows: jax.Array,
    row_scales: jax.Array,
    matrix: jax.Array,
    column_scales: jax.Array,
    dtype: Any,
) -> jax.Array:
    """silu(gates) * ups [t, m] in `dtype`, of two bytes, of rows [t, inputs] with scales [t, 1], and of a matrix
    [2 * m, inputs] with scales [2 * m], gates first."""
    (tokens, inputs), numbers = rows.shape, len(matrix) // 2
    blocks = gate_blocks_of(tokens, numbers, inputs)
    assert blocks is not None
    height, part, ahead = blocks
    in_codes = in_shared(SIZE, rows.dtype)
    ring: list[Any] = [
        plgpu.SMEM((ahead, height, SIZE), rows.dtype, transforms=in_codes),
        plgpu.SMEM((ahead, 2 * part, SIZE), rows.dtype, transforms=in_codes),
        plgpu.Barrier(num_arrivals=3, num_barriers=ahead),
        plgpu.ClusterBarrier(collective_axes=(TILE,), num_arrivals=GROUPS, num_barriers=ahead),
    ]
    run = plgpu.kernel(
        partial(_kernel, blocks),
        out_type=jax.ShapeDtypeStruct((tokens, numbers), dtype),  # type: ignore[no-untyped-call]
        scratch_types=(
            plgpu.SMEM((GROUPS, WIDE, store_width(part)), dtype, transforms=in_shared(store_width(part), dtype)),
            ring,
            plgpu.SMEM((2, 2, part), jnp.float32),
            plgpu.SMEM((height,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=2),
        ),
        grid=(blocks.clusters(numbers),),
        grid_names=("cluster",),
        cluster=(TILES,),
        cluster_names=(TILE,),
        num_threads=GROUPS + 1,
        thread_name="group",
        kernel_name="many_gates",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, unsafe_no_auto_barriers=True
        ),
    )
    of_columns = column_scales.reshape(2, numbers)
    out: jax.Array = run(rows, row_scales[:, 0], matrix.reshape(2, numbers, inputs), of_columns)
    return out


class _Ring(NamedTuple):
    """Room for `ahead` blocks of rows [ahead, height, SIZE] and of the matrix [ahead, 2 * part, SIZE]."""

    rows: Any
    matrix: Any
    there: Any  # barriers: a block has come
    free: Any  # and has been read by all groups of the cluster

    @property
    def ahead(self) -> int:
        return int(self.rows.shape[0])

    def fetch(self, num_steps: Any, copy: Any) -> None:
        """`copy(step, slot, barrier)` of all steps, which are `ahead` at least, as soon as there is room."""
        plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")

        def fetch_all(_: Any) -> None:
            @pl.loop(0, num_steps)
            def begin(step: Any) -> None:
                slot = lax.rem(step, self.ahead)

                @pl.when(step >= self.ahead)
                def _() -> None:
                    plgpu.barrier_wait(self.free.at[slot])

                copy(step, slot, self.there.at[slot])

            @pl.loop(num_steps, num_steps + self.ahead)
            def end(step: Any) -> None:  # a program ends when no other writes into its memory any more
                plgpu.barrier_wait(self.free.at[lax.rem(step, self.ahead)])

        by_warp(1, fetch_all)

    def begin_product(self, sums: Any, step: Any, start: Any) -> Any:
        """Begins to add the products of 64 rows from `start` on. Returns the slot of the step."""
        slot = lax.rem(step, self.ahead)
        plgpu.barrier_wait(self.there.at[slot])
        plgpu.wgmma(sums, self.rows.at[slot, pl.ds(start, WIDE)], self.matrix.at[slot].transpose((1, 0)))
        return slot

    def add_products(self, sums: Any, first: Any, steps: int, start: Any) -> None:
        """Those of all steps. A block is free when the next one's products have begun and its own are added."""
        slot = self.begin_product(sums, first, start)

        def add(step: Any, before: Any) -> Any:
            slot = self.begin_product(sums, step, start)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(self.free.at[before])
            return slot

        slot = lax.fori_loop(first + 1, first + steps, add, slot)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free.at[slot])


def _kernel(
    blocks: GateBlocks,
    rows_ref: Any,
    row_scales_ref: Any,
    matrix_ref: Any,
    column_scales_ref: Any,
    out_ref: Any,
    store_room: Any,
    ring_refs: Any,
    of_columns: Any,
    of_rows: Any,
    rows_there: Any,
    columns_there: Any,
) -> None:
    (tokens, inputs), (height, gates, _) = rows_ref.shape, blocks
    ring, steps = _Ring(*ring_refs), inputs // SIZE
    cluster, apart = lax.axis_index("cluster"), lax.axis_size("cluster")
    num_parts = (out_ref.shape[1] // gates - cluster + apart - 1) // apart
    tile, group = lax.axis_index(TILE), lax.axis_index("group")
    tile_start, group_start = tile * (tokens - height), group * (height - WIDE)  # the latter within the tile
    of_tile = pl.ds(tile_start, height)

    def fetch() -> None:
        plgpu.copy_gmem_to_smem(row_scales_ref.at[of_tile], of_rows, rows_there)

        def copy(step: Any, slot: Any, there: Any) -> None:
            index, at = lax.div(step, steps), pl.ds(lax.rem(step, steps) * SIZE, SIZE)
            part = pl.ds((cluster + index * apart) * gates, gates)

            @pl.when(lax.rem(step, steps) == 0)
            def _() -> None:  # the scales of the part before the last one have been read
                which = lax.rem(index, 2)
                plgpu.copy_gmem_to_smem(column_scales_ref.at[:, part], of_columns.at[which], columns_there.at[which])

            plgpu.copy_gmem_to_smem(rows_ref.at[of_tile, at], ring.rows.at[slot], there)
            for which in range(2):
                to = ring.matrix.at[slot, pl.ds(which * gates, gates)]
                plgpu.copy_gmem_to_smem(matrix_ref.at[which, part, at], to, there, collective_axes=(TILE,))

        ring.fetch(num_parts * steps, copy)

    def compute() -> None:
        plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
        plgpu.barrier_wait(rows_there)

        @pl.loop(0, num_parts)
        def _(index: Any) -> None:
            which = lax.rem(index, 2)

            def multiply(sums: Any) -> None:
                ring.add_products(sums, index * steps, steps, group_start)
                plgpu.barrier_wait(columns_there.at[which])
                active = _gate(sums[...], of_rows.at[pl.ds(group_start, WIDE)], of_columns.at[which])
                own_rows = out_ref.at[pl.ds(tile_start + group_start, WIDE)]
                _store(active, store_room.at[group], own_rows, (cluster + index * apart) * gates)

            pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WIDE, 2 * gates)))

        plgpu.wait_smem_to_gmem(0)

    lax.cond(group == GROUPS, fetch, compute)


def _gate(sums: jax.Array, of_rows: Any, of_columns: Any) -> jax.Array:
    count = of_columns.shape[1]
    shape = WIDE, count
    rows = load(of_rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    by_row = lax.broadcast_in_dim(rows, shape, (0,))
    both = []
    for which in range(2):
        columns = load(of_columns.at[which], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        both.append(sums[:, which * count : (which + 1) * count] * by_row * lax.broadcast_in_dim(columns, shape, (1,)))
    gate, up = both
    return gate / (1.0 + jnp.exp(-gate)) * up


def _store(active: jax.Array, room: Any, out_ref: Any, start: Any) -> None:
    """Through shared memory, as many columns at a time as it has room for."""
    width = room.shape[1]
    for first in range(0, active.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        room[...] = active[:, first : first + width].astype(out_ref.dtype)
        plgpu.commit_smem()  # type: ignore[no-untyped-call]
        plgpu.copy_smem_to_gmem(room, out_ref.at[:, pl.ds(start + first, width)])
