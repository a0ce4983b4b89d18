"""A row of a product that is contexts read in parts: each program puts together what it multiplies.

That takes no launch of its own, and happens while the first weights are on their way. Every program reads parts of all
its inputs, which the device has in its cache: with more than one row that takes longer than a launch.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from quire.ops.few_rows import PartedRows
from quire.ops.gpu.code_fragments import (
    OF_HALVES,
    ROW_BYTES,
    SCALAR,
    Thread,
    address,
    assembly,
    i32,
    in_registers,
    is_less,
    number,
    several,
    store_where,
    times,
    total,
)
from quire.ops.gpu.code_stores import place_in_memory
from quire.ops.gpu.parts import LEAST_TOTAL
from quire.ops.gpu.row_fragments import SHORT, zero
from quire.ops.gpu.tiles import MASKED

MOST_PARTS = 16  # threads that have a part each: half of a warp, which has inputs of one head
AT_ONCE = 4  # inputs of a thread
LEAST_SIZE = MOST_PARTS * AT_ONCE  # of a head, or a multiple
THREADS = 128
TILE_INPUTS = ROW_BYTES // 2  # of a row of shared memory

HALF_OF_WARP = "0x101f"  # the lanes between which `shfl` may choose


class _Parts(NamedTuple):
    """What a thread has loaded for its inputs. Nothing waits for it until it is put together."""

    is_whole: Any
    whole: list[Any]  # words of two inputs each, of a context that is one part
    highest: Any  # of the thread's own part
    total: Any
    sums: list[list[Any]]  # of all parts, float32


NUM_ARRAYS = 5


class ContextRow(NamedTuple):
    """A row of so many inputs, in heads of `size`, with up to `most` parts."""

    inputs: int
    size: int
    most: int
    dtype: Any  # of the row

    @classmethod
    def of(cls, x: PartedRows) -> "ContextRow":
        return cls(prod(x.whole.shape[1:]), x.whole.shape[-1], len(x.outs), x.dtype)

    def arrays(self, x: PartedRows) -> list[jax.Array]:
        """Those that `place` reads."""
        heads = self.inputs // self.size
        return [
            x.counts,
            x.whole.reshape(self.inputs),
            x.highest.reshape(self.most, heads),
            x.totals.reshape(self.most, heads),
            x.outs.reshape(self.most, self.inputs),
        ]

    def place(self, arrays: Sequence[Any], start: Any, rows: Any, first: Any, count: int) -> None:
        """Blocks `first` to `first + count` of `rows` [blocks, tokens, width] in shared memory get the inputs from
        `start` on; tokens that are not there are zeros. All threads of a group do this, and wait for each other."""
        _, tokens, width = rows.shape

        def body(_: Any, *given: Any) -> None:
            *refs, shared, begin, block = given
            base = total(address(shared), times(block.registers.item(), tokens * width * 2))
            own = times(Thread.own().index, AT_ONCE)
            places = []
            for offset in range(0, count * width, width):
                for step in range(0, width, THREADS * AT_ONCE):
                    within = total(own, step)
                    is_own = is_less(within, width)
                    at = total(begin.registers.item(), within, offset)
                    places.append((is_own, within, offset, self._load(refs, is_own, at)))
            for is_own, within, offset, parts in places:
                tile, chunk = (arith.divui(within, number(size)) for size in (TILE_INPUTS, 8))
                half = times(arith.remui(within, number(8)), 2)
                tile_at = total(base, times(tile, 8 * ROW_BYTES), half, offset * tokens * 2)
                words = self._together(parts)
                for row in range(tokens):
                    swapped = arith.xori(arith.remui(chunk, number(8)), number(row))
                    where = total(tile_at, times(swapped, 16), row * ROW_BYTES)
                    both = words if row == 0 else [number(0)] * 2
                    store_where(is_own, "st.shared.v2.b32 [$1], {$2, $3};", where, both, "r,r,r")
            utils.warpgroup_barrier()  # type: ignore[no-untyped-call]

        refs = *(plgpu.RefType(),) * len(arrays), plgpu.RefType(OF_HALVES)
        in_registers((*refs, SCALAR, SCALAR), None, body)(*arrays, rows, start, first)

    def _load(self, refs: list[Any], is_own: Any, at: Any) -> _Parts:
        counts, whole, highest, totals, outs = refs
        head, part = arith.divui(at, number(self.size)), arith.remui(Thread.own().lane, number(MOST_PARTS))
        heads = self.inputs // self.size
        count = assembly(i32(), [place_in_memory(counts, number(0), 4)], "ld.global.nc.b32 $0, [$1];", "=r,l")
        # Inputs that are not there have no parts.
        count = arith.select(arith.andi(is_own, is_less(at, self.inputs)), count, number(0))
        is_part = arith.cmpi(arith.CmpIPredicate.ult, part, count)
        of_part = total(times(part, heads), head)
        sums = []
        for index in range(self.most):
            is_there = arith.cmpi(arith.CmpIPredicate.ult, number(index), count)
            sums.append(_loaded(is_there, outs, total(at, index * self.inputs), "f32", 4))
        is_whole = arith.cmpi(arith.CmpIPredicate.eq, count, number(1))
        (own,) = _loaded(is_part, highest, of_part, "f32", 1, MASKED)
        (of_own,) = _loaded(is_part, totals, of_part, "f32", 1)
        return _Parts(is_whole, _loaded(is_whole, whole, at, "b32", 2), own, of_own, sums)

    def _together(self, parts: _Parts) -> list[Any]:
        """Two words of two inputs each."""
        kind = ir.F32Type.get()
        most = parts.highest
        for lanes in (1, 2, 4, 8):
            most = _of_two("max.NaN.f32", most, _swapped(most, f"bfly.b32 $0, $1, {lanes}, 0x1f"))
        less = arith.subf(parts.highest, most)
        own = assembly(kind, [less], "ex2.approx.ftz.f32 $0, $1;", "=f,f", is_pure=True)
        whole, sums = zero(), [zero()] * AT_ONCE
        for index, numbers in enumerate(parts.sums):  # in their order, and rounded, as `combine_parts` does it
            share, of_part = (_swapped(one, f"idx.b32 $0, $1, {index}, {HALF_OF_WARP}") for one in (own, parts.total))
            whole = _with_product(share, of_part, whole)
            sums = [_with_product(share, one, so_far) for one, so_far in zip(numbers, sums, strict=True)]
        whole = _of_two("max.NaN.f32", whole, utils.c(LEAST_TOTAL, kind))
        values = [_of_two("div.full.f32", one, whole) for one in sums]
        text = f"cvt.rn.{SHORT[jnp.dtype(self.dtype).name]}x2.f32 $0, $2, $1;"
        words = [assembly(i32(), values[at : at + 2], text, "=r,f,f", is_pure=True) for at in (0, 2)]
        return [arith.select(parts.is_whole, alone, word) for alone, word in zip(parts.whole, words, strict=True)]


def _loaded(is_there: Any, ref: Any, index: Any, kind: str, count: int, other: float = 0.0) -> list[Any]:
    """Neighbours of an array outside of shared memory, or others: float32, or words of two elements each."""
    result, letter, size = (ir.F32Type.get(), "f", 4) if kind == "f32" else (i32(), "r", 2)
    names = [f"${at}" for at in range(count)]
    bits = f"{np.float32(other).view(np.uint32):#010x}"
    both = "".join(f"mov.b32 {name}, {bits}; " for name in names)
    vector, to = (f".v{count}", f"{{{', '.join(names)}}}") if count > 1 else ("", names[0])
    text = (
        f"{{ .reg .pred is_so; setp.ne.b32 is_so, ${count}, 0; {both}"
        f"@is_so ld.global.nc{vector}.b32 {to}, [${count + 1}]; }}"
    )
    given = [arith.extui(i32(), is_there), place_in_memory(ref, index, size)]
    found = assembly(several(result, count) if count > 1 else result, given, text, f"=&{letter}," * count + "r,l")
    return [llvm.extractvalue(result, found, [at]) for at in range(count)] if count > 1 else [found]


def _swapped(value: Any, how: str) -> Any:
    return assembly(ir.F32Type.get(), [value], f"shfl.sync.{how}, 0xffffffff;", "=f,f")


def _of_two(instruction: str, first: Any, second: Any) -> Any:
    return assembly(ir.F32Type.get(), [first, second], f"{instruction} $0, $1, $2;", "=f,f,f", is_pure=True)


def _with_product(first: Any, second: Any, term: Any) -> Any:
    given = [first, second, term]
    return assembly(ir.F32Type.get(), given, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", is_pure=True)
