"""Adds the sums of the groups of threads that share the inputs of some outputs; see `few_row_kernel`.

The groups belong to one program, or to the programs of a cluster, which write into each other's shared memory. Each
group adds, over all groups, the sums of some warps, which are sixteen outputs of each 64. The order is that of the
programs, and of the groups within each.
"""

from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from quire.ops.gpu.hopper.code_fragments import (
    WIDE,
    Thread,
    address,
    assembly,
    i32,
    in_registers,
    nothing,
    number,
    several,
    times,
    total,
)

WARPS = 4
PAIRS_BYTES = 32 * 8  # two sums of each thread of a warp

# A thread's sums of two rows: by 64 outputs, by eight rows and by half of a tile.
Pairs = dict[tuple[int, int, int], list[Any]]


def _begin_cluster(_: Any) -> None:
    """Tell the cluster that this program has begun: others wait for that before they write into its memory."""
    assembly(nothing(), [], "barrier.cluster.arrive.relaxed.aligned;", "")


begin_cluster = in_registers((), None, _begin_cluster)


class Sources(NamedTuple):
    """The groups that share the inputs of some outputs."""

    outputs: int
    eights: int  # of rows
    splits: int  # programs
    groups: int  # of each

    @property
    def num_groups(self) -> int:
        return self.splits * self.groups

    @property
    def each(self) -> int:
        """Warps whose sums each of the first `WARPS` groups adds."""
        return max(1, WARPS // self.num_groups)

    @property
    def warp_bytes(self) -> int:
        """Bytes of the sums of a warp."""
        return self.outputs // WIDE * 2 * self.eights * PAIRS_BYTES

    def group(self) -> Any:
        return arith.divui(utils.thread_idx(), number(128))

    def rank(self) -> Any:
        """The number of this group among all."""
        if self.splits == 1:
            return self.group()
        program = assembly(i32(), [], "mov.u32 $0, %cluster_ctarank;", "=r", is_pure=True)
        return total(times(program, self.groups), self.group())

    def owner(self) -> Any:
        """The group that adds the sums of this warp over all groups."""
        return arith.divui(Thread.own().warp, number(self.each))

    def is_own(self) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, self.owner(), self.rank())

    def place(self, owner_group: Any, source: Any) -> Any:
        """Where the memory of the owner's program has a source's sums of this warp, in bytes."""
        of_source = total(times(owner_group, self.num_groups), source)
        which = arith.remui(Thread.own().warp, number(self.each))
        return times(total(times(of_source, self.each), which), self.warp_bytes)

    def exchange(self, parts: Any, pairs: Pairs) -> None:
        """Send the sums of all groups to their owners."""
        lane = total(address(parts), times(Thread.own().lane, 8))
        program, group = arith.divui(self.owner(), number(self.groups)), arith.remui(self.owner(), number(self.groups))
        base = total(lane, self.place(group, self.rank()))
        assembly(nothing(), [], "barrier.cluster.wait.acquire.aligned;", "")
        base = assembly(i32(), [base, program], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", is_pure=True)
        for index, two in enumerate(pairs.values()):
            there = total(base, index * PAIRS_BYTES)
            assembly(nothing(), [there, *two], "st.shared::cluster.v2.f32 [$0], {$1, $2};", "r,f,f")
        assembly(nothing(), [], "barrier.cluster.arrive.release.aligned;", "")
        assembly(nothing(), [], "barrier.cluster.wait.acquire.aligned;", "")

    def added(self, parts: Any, pairs: Pairs) -> Pairs:
        """The sums over all groups, in their owner."""
        kind, lane = ir.F32Type.get(), total(address(parts), times(Thread.own().lane, 8))
        bases = [total(lane, self.place(self.group(), number(source))) for source in range(self.num_groups)]
        sums: Pairs = {}
        for index, place in enumerate(pairs):
            for base in bases:
                where = total(base, index * PAIRS_BYTES)
                two = assembly(several(kind, 2), [where], "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r")
                values = [llvm.extractvalue(kind, two, [which]) for which in range(2)]
                before = sums.get(place)
                sums[place] = values if before is None else list(map(arith.addf, before, values))
        return sums
