"""Pieces of an attention kernel over codes of eight bits that put numbers into memory; see `code_fragments`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from quire.ops.gpu.hopper.code_fragments import (
    BY_COLUMN,
    BY_PRODUCT,
    CHUNK_BYTES,
    OF_HALVES,
    ROW_BYTES,
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
from quire.ops.gpu.hopper.decode_items import FEATURES

LEAST_EXPONENT = 8  # of the largest number of a query, so that its inverse is a number, too
QUERY_EXPONENT = 7  # of the largest number of a query in float16
NOT_A_NUMBER = 0x7FC00000


def scaled_query(where: Any, unit: float, is_there: Any | None = None) -> tuple[list[Any], Any]:
    """Eight numbers of a query in bfloat16, in shared memory, as four pairs of float16 in parts of a power of two; and
    what one of them stands for, times `unit`. Sixteen threads have a query. One that is not there is zero; the
    unit of one with a number that is infinite or NaN is NaN."""
    kind = ir.F32Type.get()
    four = assembly(several(i32(), 4), [where], "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r")
    words = [llvm.extractvalue(i32(), four, [at]) for at in range(4)]
    if is_there is not None:
        words = [arith.select(is_there, word, number(0)) for word in words]
    bits = [half for word in words for half in (arith.shli(word, number(16)), arith.andi(word, number(-(1 << 16))))]
    most = number(0)
    for one in bits:
        most = arith.maxui(most, arith.andi(one, number(0x7FFFFFFF)))
    for lanes in (1, 2, 4, 8):
        swap = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"
        most = arith.maxui(most, assembly(i32(), [most], swap, "=r,r"))
    exponent = arith.maxui(arith.shrui(most, number(23)), number(LEAST_EXPONENT))
    up = arith.shli(arith.subi(number(254 + QUERY_EXPONENT), exponent), number(23))
    down = arith.shli(arith.subi(exponent, number(QUERY_EXPONENT)), number(23))
    down = arith.select(is_less(exponent, 255), down, number(NOT_A_NUMBER))
    scaled = [arith.mulf(llvm.bitcast(kind, one), llvm.bitcast(kind, up)) for one in bits]
    text = "cvt.rn.f16x2.f32 $0, $2, $1;"
    pairs = [assembly(i32(), scaled[at : at + 2], text, "=r,f,f", is_pure=True) for at in range(0, 8, 2)]
    return pairs, arith.mulf(llvm.bitcast(kind, down), utils.c(unit, kind))


def place_queries(group: int, unit: float) -> Callable[[Any, Any, Any], None]:
    """Queries in bfloat16 [group, FEATURES] become float16 [COLUMNS, FEATURES], in the order of `widened_keys` and in
    parts of a power of two; `units` [COLUMNS] get what one of a sum of their products stands for, times `unit`.

    Queries that are not there are zero. The unit of one with a number that is infinite or NaN is NaN.
    """

    def place(_: Any, queries: Any, out: Any, units: Any) -> None:
        own = Thread.own()
        query, eight = arith.divui(own.index, number(16)), arith.remui(own.index, number(16))  # features of a thread
        row = arith.minui(query, number(group - 1))
        where = total(address(queries), times(row, 2 * FEATURES), times(eight, CHUNK_BYTES))
        pairs, value = scaled_query(where, unit, is_less(query, group))
        sixteen, second = arith.divui(eight, number(2)), arith.remui(eight, number(2))
        tile, within = arith.divui(sixteen, number(4)), times(arith.remui(sixteen, number(4)), 2)
        base = total(address(out), times(tile, 8 * ROW_BYTES), times(query, ROW_BYTES), times(second, 8))
        for half in range(2):
            at = total(base, times(arith.xori(total(within, half), query), CHUNK_BYTES))
            assembly(nothing(), [at, pairs[half], pairs[half + 2]], "st.shared.v2.b32 [$0], {$1, $2};", "r,r,r")
        at = total(address(units), times(query, 4))
        store_where(is_less(eight, 1), "st.shared.f32 [$1], $2;", at, [value], "r,f")

    return in_registers((plgpu.RefType(), plgpu.RefType(OF_HALVES), plgpu.RefType()), None, place)


def _store_weights(_: Any, weights: Any, out: Any) -> None:
    """float16 [BLOCK, COLUMNS] to [COLUMNS, BLOCK] in shared memory."""
    own = Thread.own()
    base = total(address(out), times(own.octet, 2))
    for half, register in enumerate(weights.registers.flat):
        word = utils.bitcast(register, i32())
        for which in range(2):
            column = total(times(own.quad, 2), which)
            chunk = arith.xori(total(times(own.warp, 2), half), column)
            where = total(base, times(column, ROW_BYTES), times(chunk, CHUNK_BYTES))
            bits = arith.trunci(ir.IntegerType.get_signless(16), arith.shrui(word, number(16 * which)))
            assembly(nothing(), [where, bits], "st.shared.b16 [$0], $1;", "r,h")


store_weights = in_registers((BY_PRODUCT, plgpu.RefType(OF_HALVES)), None, _store_weights)


def place_in_memory(out: Any, index: Any, size: int) -> Any:
    """The address of an element of an array outside of shared memory."""
    i64 = ir.IntegerType.get_signless(64)
    base = utils.memref_ptr(out)  # type: ignore[no-untyped-call]
    return arith.addi(llvm.ptrtoint(i64, base), arith.extui(i64, times(index, size)))


def store_rows(group: int, dtype: Any) -> Callable[[Any, Any], None]:
    """float32 [FEATURES, COLUMNS], with features in the order of `widened_values`, to [group, FEATURES]."""
    is_narrow = dtype == jnp.bfloat16
    assert is_narrow or dtype == jnp.float32

    def store(_: Any, x: Any, out: Any) -> None:
        own = Thread.own()
        halves = {(at[0], sum(at[1:])): register for at, register in np.ndenumerate(x.registers)}
        for wide in range(FEATURES // WIDE):
            feature = total(times(own.warp, 16), times(own.octet, 2), wide * WIDE)
            for which in range(2):
                column = total(times(own.quad, 2), which)
                where = place_in_memory(out, total(times(column, FEATURES), feature), jnp.dtype(dtype).itemsize)
                values = [vector.extract(halves[wide, half], [], [which]) for half in range(2)]
                if is_narrow:
                    text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
                    values = [assembly(i32(), values, text, "=r,f,f", is_pure=True)]
                    store_where(is_less(column, group), "st.global.b32 [$1], $2;", where, values, "l,r")
                else:
                    store_where(is_less(column, group), "st.global.v2.f32 [$1], {$2, $3};", where, values, "l,f,f")

    return in_registers((BY_PRODUCT, plgpu.RefType()), None, store)


def store_columns(group: int) -> Callable[[Any, Any], None]:
    """float32 [COLUMNS] to [group]."""

    def store(_: Any, x: Any, out: Any) -> None:
        own = Thread.own()
        for which in range(2):
            column = total(times(own.quad, 2), which)
            is_own = arith.andi(is_less(column, group), is_less(own.index, 4))
            value = vector.extract(x.registers.flat[0], [], [which])
            store_where(is_own, "st.global.f32 [$1], $2;", place_in_memory(out, column, 4), [value], "l,f")

    return in_registers((BY_COLUMN, plgpu.RefType()), None, store)
