"""Pieces of an attention kernel for prefills over codes of eight bits, for Mosaic; see `code_fragments`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from quire.ops.gpu.hopper.code_fragments import (
    BY_PRODUCT,
    BY_ROW,
    CHUNK_BYTES,
    OF_CODES,
    OF_HALVES,
    ROW_BYTES,
    SCALAR,
    Thread,
    address,
    assembly,
    empty,
    fragments,
    halves,
    i32,
    in_registers,
    is_less,
    nothing,
    number,
    place_in_memory,
    place_of_scale,
    scaled_query,
    several,
    store_where,
    times,
    total,
)
from quire.ops.gpu.hopper.prefill_items import BLOCK, FEATURES, WIDE

LOAD_CHUNK = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
STORE_CHUNK = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
LOAD_BITS = "{ .reg .b16 bits; ld.shared.b16 bits, [$1]; cvt.u32.u16 $0, bits; }"  # of a bfloat16
INFINITY = 0x7F80  # as bits of bfloat16; those of NaN are larger
EXPONENT = 7  # bits of a bfloat16 below it
LEAST_POWER, MOST_POWER = 1, 253  # exponents whose inverses are numbers, too


def largest_power(page_size: int) -> Callable[[Any, Any, Any], Any]:
    """The exponent of the largest of the first `left` scales of BLOCK, an integer, or `least`, if that is larger. Those
    that are no numbers do not count."""

    def find(_: Any, scales: Any, left: Any, least: Any) -> Any:
        position = times(Thread.own().lane, BLOCK // 32)
        most = number(0)
        for offset in range(BLOCK // 32):
            at = total(position, offset)
            bits = assembly(i32(), [total(address(scales), place_of_scale(at, page_size))], LOAD_BITS, "=r,r")
            is_there = arith.cmpi(arith.CmpIPredicate.slt, at, left.registers.item())
            counts = arith.andi(is_there, is_less(bits, INFINITY))
            most = arith.maxui(most, arith.select(counts, bits, number(0)))
        most = assembly(i32(), [most], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r")
        power = arith.minui(arith.shrui(most, number(EXPONENT)), number(MOST_POWER))
        largest = arith.maxui(arith.maxui(power, number(LEAST_POWER)), least.registers.item())
        return mgpu.FragmentedArray.splat(largest, (), is_signed=True)

    kind = plgpu.ShapeDtypeStruct((), jnp.int32, SCALAR)
    return in_registers((plgpu.RefType(), SCALAR, SCALAR), kind, find)


def widen_rows(code_dtype: str, page_size: int) -> Callable[..., None]:
    """Codes [BLOCK, FEATURES] in shared memory, times the scales of their rows in parts of a power of two, as float16
    in shared memory. Rows from `left` on become zeros, whatever they hold. A thread has a row. What one stands for,
    the power, is put down at `unit` [1]."""

    def widen(_: Any, codes: Any, scales: Any, left: Any, power: Any, out: Any, unit: Any) -> None:
        own, kind = Thread.own(), ir.F32Type.get()
        row, eight, exponent = own.index, arith.remui(own.index, number(8)), power.registers.item()
        is_there = arith.cmpi(arith.CmpIPredicate.slt, row, left.registers.item())
        bits = assembly(i32(), [total(address(scales), place_of_scale(row, page_size))], LOAD_BITS, "=r,r")
        scale = llvm.bitcast(kind, arith.shli(arith.select(is_there, bits, number(0)), number(16)))
        inverse = llvm.bitcast(kind, arith.shli(arith.subi(number(254), exponent), number(23)))
        part = arith.mulf(scale, inverse)
        twice = assembly(i32(), [part], "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", is_pure=True)
        factors = utils.bitcast(twice, ir.VectorType.get((2,), ir.F16Type.get()))
        source = total(address(codes), times(row, ROW_BYTES))
        # Two tiles of eight rows and 64 numbers lie side by side.
        rows = total(times(arith.divui(row, number(8)), 2 * 8 * ROW_BYTES), times(eight, ROW_BYTES))
        target = total(address(out), rows)
        for chunk in range(FEATURES // CHUNK_BYTES):
            where = total(source, times(arith.xori(eight, number(chunk)), CHUNK_BYTES))
            four = assembly(several(i32(), 4), [where], LOAD_CHUNK, "=r,=r,=r,=r,r")
            words = [arith.select(is_there, llvm.extractvalue(i32(), four, [at]), number(0)) for at in range(4)]
            pairs = [arith.mulf(pair, factors) for word in words for pair in halves(code_dtype, word)]
            wide = [utils.bitcast(pair, i32()) for pair in pairs]
            for half in range(2):
                tile, within = divmod(2 * chunk + half, 8)
                at = total(target, times(arith.xori(eight, number(within)), CHUNK_BYTES), tile * 8 * ROW_BYTES)
                assembly(nothing(), [at, *wide[4 * half : 4 * half + 4]], STORE_CHUNK, "r,r,r,r,r")
        value = llvm.bitcast(kind, arith.shli(exponent, number(23)))
        store_where(is_less(own.index, 1), "st.shared.f32 [$1], $2;", address(unit), [value], "r,f")

    refs = plgpu.RefType(OF_CODES), plgpu.RefType()
    return in_registers((*refs, SCALAR, SCALAR, plgpu.RefType(OF_HALVES), plgpu.RefType()), None, widen)


def place_rows(unit: float) -> Callable[[Any, Any, Any], None]:
    """Queries in bfloat16 [t, g, FEATURES] as float16 [WIDE, FEATURES], token by token, in parts of a power of two;
    `units` [WIDE] get what one of a sum of their products stands for, times `unit`. Rows that are not there stay as
    they are. All threads of the group are done with the rows before, when they begin."""

    def place(_: Any, queries: Any, out: Any, units: Any) -> None:
        utils.warpgroup_barrier()  # type: ignore[no-untyped-call]
        own, (tokens, of_head, _) = Thread.own(), ir.MemRefType(queries.type).shape
        eight, chunk = arith.divui(own.index, number(16)), arith.remui(own.index, number(16))
        source = total(address(queries), times(own.index, CHUNK_BYTES))
        tile, within = arith.divui(chunk, number(8)), arith.remui(chunk, number(8))
        place = total(
            times(tile, 8 * ROW_BYTES), times(eight, ROW_BYTES), times(arith.xori(within, eight), CHUNK_BYTES)
        )
        target, its_units = total(address(out), place), total(address(units), times(eight, 4))
        for first in range(0, tokens * of_head, 8):  # rows that all threads move together, sixteen a row
            pairs, value = scaled_query(total(source, first * 2 * FEATURES), unit)
            assembly(nothing(), [total(target, first * 2 * ROW_BYTES), *pairs], STORE_CHUNK, "r,r,r,r,r")
            store_where(is_less(chunk, 1), "st.shared.f32 [$1], $2;", total(its_units, 4 * first), [value], "r,f")

    return in_registers((plgpu.RefType(), plgpu.RefType(OF_HALVES), plgpu.RefType()), None, place)


def load_rows(_: Any, units: Any) -> Any:
    """float32 [WIDE] in shared memory."""
    layout, own = BY_ROW.to_mgpu(), Thread.own()
    registers = empty(layout, (WIDE,))
    for half, at in enumerate(np.ndindex(registers.shape)):
        where = total(address(units), times(_row(own, half), 4))
        value = assembly(ir.F32Type.get(), [where], "ld.shared.f32 $0, [$1];", "=f,r")
        vector_of_one = llvm.mlir_undef(ir.VectorType.get((1,), ir.F32Type.get()))
        registers[at] = llvm.insertelement(vector_of_one, value, number(0))
    return fragments(registers, layout)


units_of_rows = in_registers((plgpu.RefType(),), plgpu.ShapeDtypeStruct((WIDE,), jnp.float32, BY_ROW), load_rows)


def row_tokens(queries: int) -> Callable[[], Any]:
    """int32 [WIDE]: the token of each row, with so many queries of each."""

    def find(_: Any) -> Any:
        layout, own = BY_ROW.to_mgpu(), Thread.own()
        registers = empty(layout, (WIDE,))
        for half, at in enumerate(np.ndindex(registers.shape)):
            vector_of_one = llvm.mlir_undef(ir.VectorType.get((1,), i32()))
            registers[at] = llvm.insertelement(vector_of_one, arith.divui(_row(own, half), number(queries)), number(0))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return in_registers((), plgpu.ShapeDtypeStruct((WIDE,), jnp.int32, BY_ROW), find)


def _row(own: Thread, half: int) -> Any:
    return total(times(own.warp, 16), own.octet, 8 * half)


def store_tokens(queries: int, stride: int) -> Callable[[Any, Any, Any], None]:
    """float32 [WIDE, FEATURES], rows as in `row_tokens`, as bfloat16 to memory where the first token's queries are; the
    next token's are `stride` numbers behind. Of the first `left` tokens."""

    def store(_: Any, x: Any, out: Any, left: Any) -> None:
        own = Thread.own()
        places = {(at[1], sum(at[2:])): register for at, register in np.ndenumerate(x.registers)}
        for half in range(2):
            row = _row(own, half)
            token, query = arith.divui(row, number(queries)), arith.remui(row, number(queries))
            is_real = arith.cmpi(arith.CmpIPredicate.slt, token, left.registers.item())
            start = total(times(token, stride), times(query, FEATURES), times(own.quad, 2))
            for eight in range(FEATURES // 8):
                two = [vector.extract(places[eight, half], [], [which]) for which in range(2)]
                word = assembly(i32(), two, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", is_pure=True)
                where = place_in_memory(out, total(start, 8 * eight), jnp.dtype(jnp.bfloat16).itemsize)
                store_where(is_real, "st.global.b32 [$1], $2;", where, [word], "l,r")

    return in_registers((BY_PRODUCT, plgpu.RefType(), SCALAR), None, store)
