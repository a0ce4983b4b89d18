"""Gates and ups of many rows of decodes, both in codes of e4m3, multiplied and gated in one launch.

A program has a part of the gates and the ups that belong to them, then another part, whose blocks come while it gates.
Parts have such a size that all multiprocessors have about as much to do.

The device adds the products of all inputs, as in the library's products of so many rows, which is also the faster one
for the next product: it takes one scale of each row, so that rows are rounded in a launch of their own.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.gpu.hopper.code_product import in_shared, load
from quire.ops.gpu.hopper.mosaic import MULTIPROCESSORS
from quire.ops.gpu.hopper.row_tiles import GROUPS, REGISTERS, SIZE, WIDE, Ring, RowTiles, ring

PARTS = 128, 112, 96  # gates; two accumulators of the device have 256 columns at most
TILES = (72, 128), (200, 256)  # rows of one tile, and of two; between them the library's product is as fast
SHARED_BYTES = 224 << 10
ALIGNED = 1024  # bytes: where arrays in shared memory begin
LEAST_AHEAD, MOST_AHEAD = 3, 6
PAIR = "pair"  # the axis of the programs of a cluster


class GateBlocks(NamedTuple):
    tiles: RowTiles
    part: int  # gates that a program has at a time
    ahead: int
    pairs: bool  # programs are pairs that share rows, or, with two tiles, which they always are, the matrix

    @property
    def parts_at_once(self) -> int:
        """Of a program, or of a pair."""
        return 2 if self.pairs and self.tiles.num_tiles == 1 else 1

    def programs(self, numbers: int) -> int:
        """Programs or pairs that run at once, each with parts of so many gates."""
        return min(numbers // self.part // self.parts_at_once, MULTIPROCESSORS // (1 + self.pairs))

    def most_gates(self, numbers: int) -> int:
        """Of one program."""
        return self.part * -(-(numbers // self.part // self.parts_at_once) // self.programs(numbers))


def gate_blocks_of(num_rows: int, numbers: int, inputs: int) -> GateBlocks | None:
    """None: the kernel is not for it."""
    count = next((n for n, (least, most) in enumerate(TILES, 1) if least <= num_rows <= most), 0)
    if not count or num_rows % 8 or inputs % SIZE:
        return None
    tiles, found = RowTiles.of(num_rows, count), []
    for part in PARTS:
        ahead = min(ahead_of(tiles, part), inputs // SIZE)
        if numbers % part == 0 and ahead >= LEAST_AHEAD:
            pairs = count == 2 or (numbers % (2 * part) == 0 and num_rows % 16 == 0)
            found.append(GateBlocks(tiles, part, ahead, pairs))
    return min(found, key=lambda blocks: blocks.most_gates(numbers), default=None)  # of equals the largest part


def ahead_of(tiles: RowTiles, part: int) -> int:
    """Blocks that have room at once."""
    others = GROUPS * WIDE * leaving(part) * 2 + ALIGNED + 16 * part
    return min(MOST_AHEAD, (SHARED_BYTES - others) // ((tiles.height + 2 * part) * SIZE))


def leaving(part: int) -> int:
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
    tiles, part, ahead, pairs = blocks
    across: dict[str, Any] = {"cluster": (2,), "cluster_names": (PAIR,)} if pairs else {}
    memory, barriers = ring(tiles, 2 * part, ahead, 3, rows.dtype, PAIR if pairs else None)
    run = plgpu.kernel(
        partial(_kernel, blocks),
        out_type=jax.ShapeDtypeStruct((tokens, numbers), dtype),  # type: ignore[no-untyped-call]
        scratch_types=(
            plgpu.SMEM((GROUPS, WIDE, leaving(part)), dtype, transforms=in_shared(leaving(part), dtype)),
            [*memory, *barriers],
            plgpu.SMEM((2, 2, part), jnp.float32),
            plgpu.SMEM((tiles.height,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=2),
        ),
        grid=(blocks.programs(numbers),),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="group",
        kernel_name="many_gates",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, unsafe_no_auto_barriers=True
        ),
        **across,
    )
    of_columns = column_scales.reshape(2, numbers)
    out: jax.Array = run(rows, row_scales[:, 0], matrix.reshape(2, numbers, inputs), of_columns)
    return out


class _Place(NamedTuple):
    """The part of the rows that a program has, and its parts of the matrix, one after the other."""

    tile: Any
    first: Any
    apart: int
    num_parts: Any

    @staticmethod
    def of(blocks: GateBlocks, num_parts: int) -> "_Place":
        program, apart, at_once = lax.axis_index("program"), lax.axis_size("program"), blocks.parts_at_once
        tile: Any = 0 if blocks.tiles.num_tiles == 1 else lax.axis_index(PAIR)
        within: Any = 0 if at_once == 1 else lax.axis_index(PAIR)
        count = (num_parts // at_once - program + apart - 1) // apart
        return _Place(tile, at_once * program + within, at_once * apart, count)

    def part(self, index: Any) -> Any:
        return self.first + index * self.apart


def _kernel(
    blocks: GateBlocks,
    rows_ref: Any,
    row_scales_ref: Any,
    matrix_ref: Any,
    column_scales_ref: Any,
    out_ref: Any,
    leaving_room: Any,
    coming: Any,
    of_columns: Any,
    of_rows: Any,
    rows_there: Any,
    columns_there: Any,
) -> None:
    (tokens, inputs), tiles, gates = rows_ref.shape, blocks.tiles, blocks.part
    coming, steps = Ring(*coming), inputs // SIZE
    place, group = _Place.of(blocks, out_ref.shape[1] // blocks.part), lax.axis_index("group")
    in_tile, first = tiles.first(tokens, place.tile, group)
    of_tile = pl.ds(place.tile * (tokens - tiles.height), tiles.height)
    together = (PAIR,) if blocks.pairs else None
    rows_by, matrix_by = (together, None) if tiles.num_tiles == 1 else (None, together)

    def fetch() -> None:
        plgpu.copy_gmem_to_smem(row_scales_ref.at[of_tile], of_rows, rows_there)

        def copy(step: Any, slot: Any, there: Any) -> None:
            index, at = lax.div(step, steps), pl.ds(lax.rem(step, steps) * SIZE, SIZE)
            part = pl.ds(place.part(index) * gates, gates)

            @pl.when(lax.rem(step, steps) == 0)
            def _() -> None:  # the scales of the part before the last one have been read
                which = lax.rem(index, 2)
                plgpu.copy_gmem_to_smem(column_scales_ref.at[:, part], of_columns.at[which], columns_there.at[which])

            plgpu.copy_gmem_to_smem(rows_ref.at[of_tile, at], coming.rows.at[slot], there, collective_axes=rows_by)
            for which in range(2):
                to = coming.matrix.at[slot, pl.ds(which * gates, gates)]
                plgpu.copy_gmem_to_smem(matrix_ref.at[which, part, at], to, there, collective_axes=matrix_by)

        coming.fetch(place.num_parts * steps, copy)

    def compute() -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        plgpu.barrier_wait(rows_there)

        @pl.loop(0, place.num_parts)
        def _(index: Any) -> None:
            which = lax.rem(index, 2)

            def multiply(sums: Any) -> None:
                _multiply(coming, sums, index * steps, steps, in_tile)
                plgpu.barrier_wait(columns_there.at[which])
                active = _gate(sums[...], of_rows.at[pl.ds(in_tile, WIDE)], of_columns.at[which])
                _store(active, leaving_room.at[group], out_ref.at[pl.ds(first, WIDE)], place.part(index) * gates)

            pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WIDE, 2 * gates)))

        plgpu.wait_smem_to_gmem(0)

    lax.cond(group == GROUPS, fetch, compute)


def _multiply(blocks_on_way: Ring, sums: Any, first: Any, steps: int, start: Any) -> None:
    """Adds the products of all steps. A block is free when the next one's products have begun and its own are added."""
    slot = blocks_on_way.multiply(sums, first, start)

    def add(step: Any, before: Any) -> Any:
        slot = blocks_on_way.multiply(sums, step, start)
        plgpu.wgmma_wait(1)
        plgpu.barrier_arrive(blocks_on_way.free.at[before])
        return slot

    slot = lax.fori_loop(first + 1, first + steps, add, slot)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(blocks_on_way.free.at[slot])


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


def _store(active: jax.Array, leaving_ref: Any, out_ref: Any, start: Any) -> None:
    """Through shared memory, as many columns at a time as it has room for."""
    width = leaving_ref.shape[1]
    for first in range(0, active.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        leaving_ref[...] = active[:, first : first + width].astype(out_ref.dtype)
        plgpu.commit_smem()  # type: ignore[no-untyped-call]
        plgpu.copy_smem_to_gmem(leaving_ref, out_ref.at[:, pl.ds(start + first, width)])
