"""Pieces of an attention kernel over codes of eight bits, for Mosaic, where each thread's registers count.

A group of 128 threads, four warps, computes with BLOCK positions of one head at a time. The device multiplies matrices
whose wide side is in registers: positions for scores, features for values. A thread takes codes as the device hands
them out (`ldmatrix`), and widens them where they are. So keys have features, and values have features as rows, in
another order than in memory: `place_queries` and `store_rows` put up with it.

Threads of a warp: `octet` is a row of eight, `quad` a pair of columns. Shared memory has rows of 128 bytes, of which
the chunks of 16 are swapped by row (a swizzle), so that threads meet no other's bank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from quire.ops.gpu.hopper.decode_items import BLOCK, COLUMNS, FEATURES

WIDE = 64  # rows of one product of the device
ROW_BYTES, CHUNK_BYTES = 128, 16
SCALES_OF_PAGE = 64  # places for the scales of a page in shared memory: copies begin at multiples of 128 bytes

BY_PRODUCT = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = BY_PRODUCT.reduce(1), BY_PRODUCT.reduce(0)
SCALAR = plgpu.Layout.WG_SPLAT
OF_CODES = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(ROW_BYTES))
OF_HALVES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(ROW_BYTES))

# Two pairs of float16, $0 and $1, of the four codes of $2, in their order. For int8: 1024 and a code that is made 128
# larger, less 1152.
TO_FLOAT16 = {
    "float8_e4m3fn": """{
    .reg .b16 first, second;
    mov.b32 {first, second}, $2;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
    }""",
    "int8": """{
    .reg .b32 base, codes;
    mov.b32 base, 0x64806480;
    prmt.b32 codes, $2, 0, 0x4140;
    xor.b32 codes, codes, base;
    sub.f16x2 $0, codes, base;
    prmt.b32 codes, $2, 0, 0x4342;
    xor.b32 codes, codes, base;
    sub.f16x2 $1, codes, base;
    }""",
}
LOAD_MATRICES = "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16 {{$0, $1, $2, $3}}, [$4];"


class Thread(NamedTuple):
    index: Any  # within its group
    warp: Any
    lane: Any
    octet: Any
    quad: Any

    @classmethod
    def own(cls) -> "Thread":
        index = arith.remui(utils.thread_idx(), number(128))
        lane = arith.remui(index, number(32))
        quarter = arith.divui(lane, number(4)), arith.remui(lane, number(4))
        return cls(index, arith.divui(index, number(32)), lane, *quarter)


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def number(value: int) -> Any:
    return utils.c(value, i32())


def total(*terms: Any) -> Any:
    """Sums of values and of integers that are known."""
    known = sum(term for term in terms if isinstance(term, int))
    result = number(known)
    for term in terms:
        result = result if isinstance(term, int) else arith.addi(term, result)
    return result


def times(value: Any, factor: int) -> Any:
    return arith.muli(value, number(factor))


def is_less(value: Any, bound: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, value, number(bound))


def address(ref: Any) -> Any:
    """In shared memory, 32 bits."""
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))  # type: ignore[no-untyped-call]


def assembly(result: Any, given: list[Any], text: str, constraints: str, *, is_pure: bool = False) -> Any:
    return llvm.inline_asm(result, given, text, constraints, has_side_effects=not is_pure)


def several(kind: Any, count: int) -> Any:
    return llvm.StructType.get_literal([kind] * count)


def nothing() -> Any:
    return ir.Type.parse("!llvm.void")


def store_where(condition: Any, instruction: str, where: Any, values: list[Any], constraints: str) -> None:
    """`instruction` has $1 for its address, and the values after it."""
    text = f"{{ .reg .pred is_so; setp.ne.b32 is_so, $0, 0; @is_so {instruction} }}"
    assembly(nothing(), [arith.extui(i32(), condition), where, *values], text, "r," + constraints)


def bits_before(left: Any, position: Any) -> Any:
    """A mask of two halves: of `position` and the next, if they are among the first `left`."""
    count = arith.maxsi(arith.subi(left, position), number(0))
    return assembly(i32(), [times(count, 16)], "bmsk.clamp.b32 $0, 0, $1;", "=r,r", is_pure=True)


def halves(code_dtype: str, word: Any) -> list[Any]:
    """Two vectors of two float16."""
    both = assembly(several(i32(), 2), [word], TO_FLOAT16[code_dtype], "=r,=r,r", is_pure=True)
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    return [utils.bitcast(llvm.extractvalue(i32(), both, [half]), pair) for half in range(2)]


def load_matrices(where: Any, *, is_turned: bool) -> list[Any]:
    """Four matrices of 8 x 8 pairs of codes; each lane says where a row of eight pairs is."""
    text = LOAD_MATRICES.format(".trans" if is_turned else "")
    four = assembly(several(i32(), 4), [where], text, "=r,=r,=r,=r,r")
    return [llvm.extractvalue(i32(), four, [index]) for index in range(4)]


def empty(layout: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(layout.registers_shape(shape), dtype=object)


def fragments(registers: Any, layout: Any) -> Any:
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def in_registers(arguments: tuple[Any, ...], result: Any, body: Callable[..., Any]) -> Callable[..., Any]:
    """A step of a kernel that `body` writes for each thread of a group, with arrays as their registers."""
    inline: Any = plgpu.inline_mgpu
    made: Callable[..., Any] = inline(arg_types=arguments, return_type=result)(body)
    return made


def widened_keys(code_dtype: str) -> Callable[[Any], Any]:
    """float16 [BLOCK, FEATURES] of codes in shared memory. Of each 16 features, those that are 0 or 1 more than a
    multiple of four come first."""

    def widen(_: Any, codes: Any) -> Any:
        layout = BY_PRODUCT.to_mgpu()
        registers = empty(layout, (BLOCK, FEATURES))
        places = {(at[1], sum(at[2:])): at for at in np.ndindex(registers.shape)}  # by eight features and eight rows
        own = Thread.own()
        row, matrix = arith.remui(own.lane, number(8)), arith.divui(own.lane, number(8))
        rows = total(times(own.warp, 16), times(arith.remui(matrix, number(2)), 8), row)
        base = total(address(codes), times(rows, ROW_BYTES))
        for first in range(0, FEATURES // CHUNK_BYTES, 2):
            chunk = arith.xori(total(arith.divui(matrix, number(2)), first), row)
            words = load_matrices(total(base, times(chunk, CHUNK_BYTES)), is_turned=False)
            for index, word in enumerate(words):
                for half, pair in enumerate(halves(code_dtype, word)):
                    registers[places[2 * (first + index // 2) + half, index % 2]] = pair
        return fragments(registers, layout)

    return in_registers(
        (plgpu.RefType(OF_CODES),), plgpu.ShapeDtypeStruct((BLOCK, FEATURES), jnp.float16, BY_PRODUCT), widen
    )


def widened_values(code_dtype: str) -> Callable[[Any, Any], Any]:
    """float16 [FEATURES, BLOCK] of codes in shared memory, zeros from position `left` on. Of each 16 features the even
    ones come first."""

    def widen(_: Any, codes: Any, left: Any) -> Any:
        layout = BY_PRODUCT.to_mgpu()
        registers = empty(layout, (FEATURES, BLOCK))
        places = {(at[0], at[1], sum(at[2:])): at for at in np.ndindex(registers.shape)}
        own = Thread.own()
        row, matrix = arith.remui(own.lane, number(8)), arith.divui(own.lane, number(8))
        base = total(address(codes), times(row, ROW_BYTES), times(matrix, 8 * ROW_BYTES))
        end = left.registers.item()
        masks = [bits_before(end, total(times(own.quad, 2), 8 * index)) for index in range(BLOCK // 8)]
        for wide in range(FEATURES // WIDE):
            chunk = arith.xori(total(own.warp, wide * (WIDE // CHUNK_BYTES)), row)
            for four in range(BLOCK // 32):
                where = total(base, times(chunk, CHUNK_BYTES), four * 32 * ROW_BYTES)
                for index, word in enumerate(load_matrices(where, is_turned=True), 4 * four):
                    seen = arith.andi(word, masks[index])
                    by_feature = assembly(i32(), [seen], "prmt.b32 $0, $1, 0, 0x3120;", "=r,r", is_pure=True)
                    for half, pair in enumerate(halves(code_dtype, by_feature)):
                        registers[places[wide, index, half]] = pair
        return fragments(registers, layout)

    return in_registers(
        (plgpu.RefType(OF_CODES), SCALAR), plgpu.ShapeDtypeStruct((FEATURES, BLOCK), jnp.float16, BY_PRODUCT), widen
    )


def place_of_scale(position: Any, page_size: int) -> Any:
    """Bytes from the first scale in shared memory."""
    page, offset = arith.divui(position, number(page_size)), arith.remui(position, number(page_size))
    return total(times(page, 2 * SCALES_OF_PAGE), times(offset, 2))


def scales_by_row(page_size: int) -> Callable[[Any], Any]:
    """float32 [BLOCK] of bfloat16 [pages, SCALES_OF_PAGE] in shared memory."""

    def load(_: Any, scales: Any) -> Any:
        layout, own, kind = BY_ROW.to_mgpu(), Thread.own(), ir.F32Type.get()
        registers = empty(layout, (BLOCK,))
        text = "{ .reg .b16 zero, bits; mov.b16 zero, 0; ld.shared.b16 bits, [$1]; mov.b32 $0, {zero, bits}; }"
        for half, at in enumerate(np.ndindex(registers.shape)):
            row = total(times(own.warp, 16), own.octet, 8 * half)
            bits = assembly(i32(), [total(address(scales), place_of_scale(row, page_size))], text, "=r,r")
            element = llvm.mlir_undef(ir.VectorType.get((1,), kind))
            registers[at] = llvm.insertelement(element, llvm.bitcast(kind, bits), number(0))
        return fragments(registers, layout)

    return in_registers((plgpu.RefType(),), plgpu.ShapeDtypeStruct((BLOCK,), jnp.float32, BY_ROW), load)


def largest_scale(page_size: int) -> Callable[[Any, Any], Any]:
    """The largest of the first `left` scales, a float32. None is negative; NaN is larger than any number."""

    def find(_: Any, scales: Any, left: Any) -> Any:
        position = times(Thread.own().lane, 2)
        where = total(address(scales), place_of_scale(position, page_size))
        word = assembly(i32(), [where], "ld.shared.b32 $0, [$1];", "=r,r")
        word = arith.andi(word, bits_before(left.registers.item(), position))
        most = arith.maxui(arith.shli(word, number(16)), arith.andi(word, number(-(1 << 16))))
        largest = assembly(i32(), [most], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r")
        return mgpu.FragmentedArray.splat(llvm.bitcast(ir.F32Type.get(), largest), ())

    return in_registers((plgpu.RefType(), SCALAR), plgpu.ShapeDtypeStruct((), jnp.float32, SCALAR), find)


def over_rows(instruction: str) -> Callable[[Any, Any], Any]:
    """[COLUMNS] of [BLOCK, COLUMNS] by an instruction for two numbers, by all threads of a group. Only these use
    `scratch`, and meet between two uses of it."""

    def reduce(_: Any, x: Any, scratch: Any) -> Any:
        kind, own = ir.F32Type.get(), Thread.own()

        def both(a: Any, b: Any) -> Any:
            return assembly(kind, [a, b], f"{instruction} $0, $1, $2;", "=f,f,f", is_pure=True)

        first, second = x.registers.flat
        reduced = [
            both(vector.extract(first, [], [column]), vector.extract(second, [], [column])) for column in range(2)
        ]
        for lanes in (4, 8, 16):
            swap = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"
            reduced = [both(value, assembly(kind, [value], swap, "=f,f")) for value in reduced]
        base = total(address(scratch), times(own.quad, 8))
        of_warp = total(base, times(own.warp, 4 * COLUMNS))
        store_where(is_less(own.lane, 4), "st.shared.v2.f32 [$1], {$2, $3};", of_warp, reduced, "r,f,f")
        utils.warpgroup_barrier()  # type: ignore[no-untyped-call]
        loaded = []
        for warp in range(4):
            where = total(base, warp * 4 * COLUMNS)
            two = assembly(several(kind, 2), [where], "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r")
            loaded.append([llvm.extractvalue(kind, two, [column]) for column in range(2)])
        reduced = [both(both(*pair[:2]), both(*pair[2:])) for pair in zip(*loaded, strict=True)]
        layout = BY_COLUMN.to_mgpu()
        registers, pair = empty(layout, (COLUMNS,)), llvm.mlir_undef(ir.VectorType.get((2,), kind))
        for column, value in enumerate(reduced):
            pair = llvm.insertelement(pair, value, number(column))
        registers[(0,) * registers.ndim] = pair
        return fragments(registers, layout)

    return in_registers(
        (BY_PRODUCT, plgpu.RefType()), plgpu.ShapeDtypeStruct((COLUMNS,), jnp.float32, BY_COLUMN), reduce
    )


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
    for word in bits:
        most = arith.maxui(most, arith.andi(word, number(0x7FFFFFFF)))
    for lanes in (1, 2, 4, 8):
        swap = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"
        most = arith.maxui(most, assembly(i32(), [most], swap, "=r,r"))
    exponent = arith.maxui(arith.shrui(most, number(23)), number(LEAST_EXPONENT))
    up = arith.shli(arith.subi(number(254 + QUERY_EXPONENT), exponent), number(23))
    down = arith.shli(arith.subi(exponent, number(QUERY_EXPONENT)), number(23))
    down = arith.select(is_less(exponent, 255), down, number(NOT_A_NUMBER))
    scaled = [arith.mulf(llvm.bitcast(kind, word), llvm.bitcast(kind, up)) for word in bits]
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


def by_warp(count: int, body: Callable[[Any], None]) -> None:
    """`body` of the number of a warp, in the first `count` warps of a group, each by itself: they do not wait for each
    other there. A group that fetches as one does all of it four times."""

    def each() -> None:
        warp = lax.axis_index("warp")
        pl.when(warp < count)(lambda: body(warp))

    in_warps: Any = pl.kernel(each, mesh=plgpu.WarpMesh(axis_name="warp"))
    in_warps()
