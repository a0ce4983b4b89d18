"""Tiles of many rows: how programs share rows in codes and a matrix of codes, and the blocks that are on their way.

Rows are the wide side of the device's products, 64 for each group of threads. Groups of a tile whose rows are no
multiple of 64 have some rows in common, and so have tiles: both compute the same bits, and store them.

A warp of one more group keeps blocks of rows and of the matrix on their way into shared memory. Programs of a cluster
that need the same blocks get them together, each asks for a part: what multiprocessors can ask of the second cache is a
limit.
"""

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.gpu.hopper.code_product import NARROW, in_shared
from quire.ops.gpu.hopper.warps import by_warp

WIDE = 64  # rows of a group
SIZE = 128  # inputs of a block
GROUPS = 2  # of threads that compute, for each tile
# Of a thread that fetches, and of one that computes.
FETCHING_REGISTERS, REGISTERS = 32, 232


class RowTiles(NamedTuple):
    """`num_tiles` of `height` rows, 64 of which each group has."""

    num_tiles: int
    height: int

    @classmethod
    def of(cls, num_rows: int, count: int) -> "RowTiles":
        return cls(count, -(-num_rows // (count * NARROW)) * NARROW)

    def first(self, num_rows: int, tile: Any, group: Any) -> tuple[Any, Any]:
        """The first row of a group, in its tile and among all."""
        in_tile = group * (self.height - WIDE)
        return in_tile, tile * (num_rows - self.height) + in_tile


class Ring(NamedTuple):
    """Room for `ahead` blocks of rows [ahead, height, SIZE] and of the matrix [ahead, outputs, SIZE]."""

    rows: Any
    matrix: Any
    there: Any  # barriers: a block has come
    free: Any  # and has been read by all groups, those of other programs that get its parts, too

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

    def multiply(self, sums: Any, step: Any, start: Any) -> Any:
        """Begins to add products of 64 rows from `start` on. The slot of the step."""
        slot = lax.rem(step, self.ahead)
        plgpu.barrier_wait(self.there.at[slot])
        plgpu.wgmma(sums, self.rows.at[slot, pl.ds(start, WIDE)], self.matrix.at[slot].transpose((1, 0)))
        return slot


def ring(tiles: RowTiles, outputs: int, ahead: int, copies: int, dtype: Any, shared_by: str | None) -> tuple[Any, Any]:
    """The memory and the barriers of a `Ring`. `shared_by`: the axis of programs that get blocks together."""
    transforms = in_shared(SIZE, dtype)
    free: Any = (
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=ahead)
        if shared_by is None
        else plgpu.ClusterBarrier(collective_axes=(shared_by,), num_arrivals=GROUPS, num_barriers=ahead)
    )
    memory = [plgpu.SMEM((ahead, height, SIZE), dtype, transforms=transforms) for height in (tiles.height, outputs)]
    return memory, [plgpu.Barrier(num_arrivals=copies, num_barriers=ahead), free]
