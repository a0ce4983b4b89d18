"""Sums of groups of threads that share the inputs of some outputs, added and put into memory; see `four_bit_rows`.

They are groups of one program, or of the programs of a cluster, which write into each other's shared memory. Each adds
the sums of some outputs: those that are a half of a warp's tile, eight for each 64 outputs, one after the other. Their
order is that of the programs, and of the groups of each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from quire.ops.gpu.code_fragments import (
    BY_PRODUCT,
    WIDE,
    Thread,
    address,
    assembly,
    i32,
    in_registers,
    is_less,
    nothing,
    number,
    several,
    store_where,
    times,
    total,
)
from quire.ops.gpu.code_stores import place_in_memory
from quire.ops.gpu.row_fragments import by_place

HALVES = 8  # of tiles, for each 64 outputs
PAIRS_BYTES = 32 * 8  # two sums of each thread of a warp

Pairs = dict[tuple[int, int, int], list[Any]]  # a thread's sums, by 64 outputs, by eight rows and by half of a tile


def _begin_cluster(_: Any) -> None:
    """A program's memory is there when it has begun: the others wait for that before they write into it."""
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
        """Halves of tiles that a group adds."""
        return HALVES * (self.outputs // WIDE) // self.num_groups

    @property
    def half_bytes(self) -> int:
        """Sums of a half of a tile, of a warp."""
        return self.eights * PAIRS_BYTES

    def group(self) -> Any:
        return arith.divui(utils.thread_idx(), number(128))

    def rank(self) -> Any:
        """The place of this group among them."""
        if self.splits == 1:
            return self.group()
        program = assembly(i32(), [], "mov.u32 $0, %cluster_ctarank;", "=r", is_pure=True)
        return total(times(program, self.groups), self.group())

    def owner(self, tall: int, half: int) -> tuple[Any, Any]:
        """The group that adds a half of a thread's tile, and which of its halves that is."""
        index = total(times(Thread.own().warp, 2), tall * HALVES + half)
        return arith.divui(index, number(self.each)), arith.remui(index, number(self.each))

    def place(self, owner_group: Any, source: Any, which: Any) -> Any:
        """The bytes before what a source has of a half, in the memory of the program whose group adds it."""
        of_source = total(times(owner_group, self.num_groups), source)
        return total(times(of_source, self.each * self.half_bytes), times(which, self.half_bytes))

    def exchange(self, parts: Any, pairs: Pairs) -> Pairs:
        """Sums of all groups, where a half of a tile is this group's; else what others have no use for."""
        lane, kind = total(address(parts), times(Thread.own().lane, 8)), ir.F32Type.get()
        rank, own_group = self.rank(), self.group()
        assembly(nothing(), [], "barrier.cluster.wait.acquire.aligned;", "")
        for (tall, eight, half), two in pairs.items():
            owner, which = self.owner(tall, half)
            program, group = arith.divui(owner, number(self.groups)), arith.remui(owner, number(self.groups))
            where = total(lane, self.place(group, rank, which), eight * PAIRS_BYTES)
            there = assembly(i32(), [where, program], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", is_pure=True)
            assembly(nothing(), [there, *two], "st.shared::cluster.v2.f32 [$0], {$1, $2};", "r,f,f")
        assembly(nothing(), [], "barrier.cluster.arrive.release.aligned;", "")
        assembly(nothing(), [], "barrier.cluster.wait.acquire.aligned;", "")
        found: Pairs = {}
        for tall, eight, half in pairs:
            _, which = self.owner(tall, half)
            for source in range(self.num_groups):
                where = total(lane, self.place(own_group, number(source), which), eight * PAIRS_BYTES)
                two = assembly(several(kind, 2), [where], "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r")
                added = [llvm.extractvalue(kind, two, [which_row]) for which_row in range(2)]
                before = found.get((tall, eight, half))
                found[tall, eight, half] = (
                    added if before is None else [arith.addf(a, b) for a, b in zip(before, added, strict=True)]
                )
        return found


def store(
    outputs: int, splits: int, groups: int, shape: tuple[int, int], dtype: Any
) -> Callable[[Any, Any, Any], None]:
    """Sums [outputs, tokens] of each of `groups` of each of `splits` programs to some of the outputs of an array
    [tokens, all outputs]. It may end within eight tokens. `parts` is shared memory for the sums of all groups of a
    program."""
    tokens, stride = shape
    sources = Sources(outputs, -(-tokens // 8), splits, groups)

    def put(_: Any, sums: Any, parts: Any, out: Any) -> None:
        own = Thread.own()
        pairs: Pairs = {
            place: [vector.extract(sums.registers[at], [], [which]) for which in range(2)]
            for place, at in by_place(sums.registers).items()
        }
        if sources.num_groups > 1:
            pairs = sources.exchange(parts, pairs)
        for (tall, eight, half), two in pairs.items():
            output = total(times(own.warp, 16), own.octet, tall * WIDE + half * 8)
            is_own = arith.cmpi(arith.CmpIPredicate.eq, sources.owner(tall, half)[0], sources.rank())
            for which, one in enumerate(two):
                row = total(times(own.quad, 2), eight * 8 + which)
                is_there = is_own if tokens % 8 == 0 else arith.andi(is_own, is_less(row, tokens))
                where = place_in_memory(out, total(times(row, stride), output), jnp.dtype(dtype).itemsize)
                _store_where(is_there, where, one, dtype)

    return in_registers((BY_PRODUCT, plgpu.RefType(), plgpu.RefType()), None, put)


def _store_where(condition: Any, where: Any, value: Any, dtype: Any) -> None:
    if dtype == jnp.float32:
        store_where(condition, "st.global.f32 [$1], $2;", where, [value], "l,f")
        return
    text = f"cvt.rn.{'bf16' if dtype == jnp.bfloat16 else 'f16'}.f32 $0, $1;"
    bits = assembly(ir.IntegerType.get_signless(16), [value], text, "=h,f", is_pure=True)
    store_where(condition, "st.global.b16 [$1], $2;", where, [bits], "l,h")
