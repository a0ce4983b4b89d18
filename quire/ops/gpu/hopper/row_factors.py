"""The factors of a norm, from sums of squares that the product before has stored.

Rows come without their factor, since no program of the kernel that makes them has a whole row; the sums of the product
are multiplied by it. A group of threads adds the squares in an order that depends on their number alone.
"""

from collections.abc import Callable
from functools import reduce
from math import ceil
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from quire.ops.gpu.hopper.cluster_sums import WARPS
from quire.ops.gpu.hopper.code_fragments import (
    BY_COLUMN,
    Thread,
    address,
    assembly,
    empty,
    fragments,
    in_registers,
    is_less,
    number,
    place_in_memory,
    several,
    store_where,
    times,
    total,
)
from quire.ops.gpu.hopper.row_fragments import COLUMNS, pair, zero

AT_ONCE = 8 * WARPS  # parts: one for each octet of a warp


class Squares(NamedTuple):
    """Sums of squares, float32 [parts, rows], of rows with so many inputs."""

    parts: int
    rows: int
    inputs: int
    eps: float

    def factors(self, tokens: int) -> Callable[[Any, Any], Any]:
        """A function of the squares, and of float32 [WARPS * tokens] in shared memory, that returns factors, float32
        [tokens]. Padding has the factor of another row."""

        def load(_: Any, squares: Any, scratch: Any) -> Any:
            own, layout = Thread.own(), BY_COLUMN.to_mgpu()
            base = total(address(scratch), times(own.quad, 8))
            loaded = [self._numbers(squares, total(times(own.quad, 2), eight)) for eight in range(0, tokens, COLUMNS)]
            for eight, numbers in enumerate(loaded):
                where = total(base, times(own.warp, 4 * tokens), eight * 4 * COLUMNS)
                sums = list(map(_sum_of_warp, numbers))
                store_where(is_less(own.lane, 4), "st.shared.v2.f32 [$1], {$2, $3};", where, sums, "r,f,f")
            utils.warpgroup_barrier()  # type: ignore[no-untyped-call]
            registers = empty(layout, (tokens,))
            for eight, at in enumerate(np.ndindex(registers.shape)):
                wheres = [total(base, (warp * tokens + eight * COLUMNS) * 4) for warp in range(WARPS)]
                of_warps = [_two(where, "ld.shared", "r") for where in wheres]
                registers[at] = pair(*(self._factor(*of_row) for of_row in zip(*of_warps, strict=True)))
            return fragments(registers, layout)

        result = plgpu.ShapeDtypeStruct((tokens,), jnp.float32, BY_COLUMN)
        return in_registers((plgpu.RefType(), plgpu.RefType()), result, load)

    def _numbers(self, squares: Any, row: Any) -> list[list[Any]]:
        """The parts that a thread adds, of a row and the next, or of the last ones."""
        own, kind = Thread.own(), ir.F32Type.get()
        at_once = 2 if self.rows % 2 == 0 else 1
        last = number(self.rows - at_once)
        of_rows: list[list[Any]] = [[], []]
        for first in range(0, self.parts, AT_ONCE):
            part = total(times(own.warp, 8), own.octet, first)
            is_part = is_less(part, self.parts)
            part = arith.minui(part, number(self.parts - 1))
            wheres = [
                place_in_memory(squares, total(times(part, self.rows), arith.minui(total(row, which), last)), 4)
                for which in range(min(2 // at_once, self.rows))
            ]
            if at_once == 2:
                numbers = _two(wheres[0], "ld.global.nc", "l")
            else:
                numbers = [assembly(kind, [where], "ld.global.nc.f32 $0, [$1];", "=f,l") for where in wheres]
            for which in range(2):
                value = numbers[min(which, len(numbers) - 1)]
                of_rows[which].append(arith.select(is_part, value, zero()) if first + AT_ONCE > self.parts else value)
        return of_rows

    def _factor(self, *of_warps: Any) -> Any:
        """The factor, from the sums of four warps."""
        kind = ir.F32Type.get()
        first, second, third, fourth = of_warps
        whole = arith.addf(arith.addf(first, second), arith.addf(third, fourth))
        mean = arith.mulf(whole, utils.c(1 / self.inputs, kind))
        mean = arith.addf(mean, utils.c(self.eps, kind))
        return assembly(kind, [mean], "rsqrt.approx.f32 $0, $1;", "=f,f", is_pure=True)


def blocks_of_squares(outputs: int) -> int:
    """Parts of the squares of so many outputs: each is the sum over a warp's tile."""
    return ceil(outputs / 16)


def over_octets(value: Any) -> Any:
    """The sum over the threads of a warp that have the same rows."""
    kind = ir.F32Type.get()
    for lanes in (4, 8, 16):
        swap = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"
        value = arith.addf(value, assembly(kind, [value], swap, "=f,f"))
    return value


def _sum_of_warp(numbers: list[Any]) -> Any:
    return over_octets(reduce(arith.addf, numbers))


def _two(where: Any, instruction: str, constraint: str) -> list[Any]:
    kind = ir.F32Type.get()
    text = f"{instruction}.v2.f32 {{$0, $1}}, [$2];"
    both = assembly(several(kind, 2), [where], text, f"=f,=f,{constraint}")
    return [llvm.extractvalue(kind, both, [which]) for which in range(2)]
