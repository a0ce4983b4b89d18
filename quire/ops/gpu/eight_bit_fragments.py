"""Eight-bit codes in `few_row_product`: how threads take and widen them.

A thread takes four neighbouring codes of an output at a time, as the device hands them out (`ldmatrix`), and the same
inputs of a row. So the device multiplies inputs in another order than they have in memory, with the same result.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from quire.ops.gpu.code_fragments import (
    BY_ROW,
    CHUNK_BYTES,
    OF_CODES,
    ROW_BYTES,
    WIDE,
    Thread,
    address,
    assembly,
    empty,
    fragments,
    i32,
    in_registers,
    load_matrices,
    number,
    several,
    times,
    total,
)
from quire.ops.gpu.code_stores import place_in_memory
from quire.ops.gpu.row_fragments import COLUMNS, INPUTS, SHORT, Sums, adds_to_sums, multiply, twice, zero

SIZE = ROW_BYTES  # inputs of a step, a row of shared memory
LEAST_CHAINS = 4  # sums that a thread adds to in turn, so that one product need not wait for the last

# Two numbers of the odd codes of $1, or of the even ones. The bits of e4m3 are a bfloat16 that is 2 ** 120 too small,
# also where it has no leading one. A code of int8 without its highest bit is put into the last bits of a number, which
# count ones; that number, or 128 more, is subtracted.
_OF_E4M3 = {
    "bfloat16": """{
    .reg .b32 signs, rest;
    TAKE
    and.b32 rest, rest, 0x07f007f0;
    lop3.b32 signs, signs, 0x80008000, rest, 0xea;
    mov.b32 rest, 0x7b807b80;
    mul.rn.bf16x2 $0, signs, rest;
    }""",
    "float16": """{
    .reg .b32 codes;
    .reg .b16 odd, even;
    prmt.b32 codes, $1, 0, 0x2031;
    mov.b32 {odd, even}, codes;
    cvt.rn.f16x2.e4m3x2 $0, TAKE;
    }""",
}
_OF_INT8 = """{
.reg .b32 codes, less;
TAKE
lop3.b32 less, codes, 0x00800080, BASE, 0xea;
lop3.b32 codes, codes, 0x007f007f, BASE, 0xea;
sub.rn.TYPEx2 $0, codes, less;
}"""
_BASES = {"bfloat16": 0x4300, "float16": 0x6400}
_TAKE_INT8 = "shr.u32 codes, $1, 8;", "mov.b32 codes, $1;"
_TAKE = {
    ("float8_e4m3fn", "bfloat16"): (
        "mov.b32 signs, $1;\nshr.u32 rest, $1, 4;",
        "shl.b32 signs, $1, 8;\nshl.b32 rest, $1, 4;",
    ),
    ("float8_e4m3fn", "float16"): ("odd", "even"),
    ("int8", "bfloat16"): _TAKE_INT8,
    ("int8", "float16"): _TAKE_INT8,
}
_ODD_AND_EVEN = "0x7632", "0x5410"  # of four numbers in two words


class EightBitSteps(NamedTuple):
    """The `Steps` of such codes: codes [outputs, width] and rows [tokens, width] in shared memory. NaN of e4m3, which
    no weight has, becomes 480."""

    num_steps: int
    outputs: int
    dtype: Any  # of rows
    code_dtype: Any

    @property
    def width(self) -> int:
        return self.num_steps * SIZE

    def in_shared(self, ahead: int) -> list[Any]:
        return [plgpu.SMEM((ahead, self.outputs, self.width), self.code_dtype, transforms=OF_CODES)]

    def slices(self, arrays: Sequence[Any], outputs: Any, inputs: Any) -> list[Any]:
        """Of codes [all outputs, all inputs]; scales [all outputs] are not fetched."""
        return [arrays[0].at[pl.ds(outputs, self.outputs), pl.ds(inputs, self.width)]]

    def add(self, arrays: Sequence[Any], rows: Any, sums: jax.Array) -> jax.Array:
        tokens = sums.shape[1]

        def body(codes: Any, rows: Any, sums: Sums) -> None:
            _add_block(self, tokens // COLUMNS, codes, rows, sums)

        add = adds_to_sums((plgpu.RefType(OF_CODES),), self.outputs, tokens, body)
        added: jax.Array = add(*arrays, rows, sums)
        return added

    def factors(self, arrays: Sequence[Any], outputs: Any) -> jax.Array:
        scales = arrays[1]
        found: jax.Array = _scales_of(self.outputs, scales.dtype)(scales.at[pl.ds(outputs, self.outputs)])
        return found

    def widened(self, word: Any, place: int) -> Any:
        """Two numbers of a word of four codes, the odd or the even ones."""
        code, number_type = (jnp.dtype(dtype).name for dtype in (self.code_dtype, self.dtype))
        text = _OF_INT8 if code == "int8" else _OF_E4M3[number_type]
        text = text.replace("TAKE", _TAKE[code, number_type][place]).replace("BASE", twice(_BASES[number_type]))
        return assembly(i32(), [word], text.replace("TYPE", SHORT[number_type]), "=r,r", is_pure=True)


def _add_block(steps: EightBitSteps, eights: int, codes: Any, rows: Any, sums: Sums) -> None:
    talls = steps.outputs // WIDE
    chains = max(1, LEAST_CHAINS // (talls * eights))
    found: dict[tuple[int, int, int], list[Any]] = {}  # by 64 outputs, by eight rows and by chain
    for first in range(0, steps.width, 2 * INPUTS):
        inputs = [_inputs_of(steps, rows, eight, first) for eight in range(eights)]
        for tall in range(talls):
            words = _words_of(steps, codes, tall, first)
            for index in range(2):
                two = words[2 * index : 2 * index + 2]  # of the halves of a tile
                wide = [steps.widened(word, place) for place in range(2) for word in two]
                for eight in range(eights):
                    chain = tall, eight, (first // INPUTS + index) % chains
                    before = found.get(chain) or [zero()] * 4
                    found[chain] = multiply(steps.dtype, wide, inputs[eight][2 * index : 2 * index + 2], before)
    for (tall, eight, _), four in found.items():
        for index, one in enumerate(four):
            half, which = divmod(index, 2)
            sums[tall, eight, half, which] = arith.addf(sums[tall, eight, half, which], one)


def _words_of(steps: EightBitSteps, codes: Any, tall: int, first: int) -> list[Any]:
    """A thread's words of codes, for each sixteen of 32 inputs of both halves of its tile."""
    own = Thread.own()
    row, which = arith.remui(own.lane, number(INPUTS)), arith.divui(own.lane, number(INPUTS))
    eight, within = arith.divui(row, number(8)), arith.remui(row, number(8))
    chunk = arith.xori(total(which, first % SIZE // CHUNK_BYTES), within)
    tile_bytes = 8 * ROW_BYTES
    eights = total(times(own.warp, 2), eight, tall * (WIDE // 8))
    where = total(address(codes), times(eights, steps.num_steps * tile_bytes), times(within, ROW_BYTES))
    return load_matrices(total(where, times(chunk, CHUNK_BYTES), first // SIZE * tile_bytes), is_turned=False)


def _inputs_of(steps: EightBitSteps, rows: Any, eight: int, first: int) -> list[Any]:
    """A thread's words of a row, for each sixteen of 32 inputs; of four neighbours, the odd ones come first."""
    own = Thread.own()
    of_row = steps.width // 64  # pieces of rows of shared memory, of two bytes each
    base = total(address(rows), times(own.octet, ROW_BYTES), times(arith.remui(own.quad, number(2)), 8))
    found = []
    for start in (first, first + INPUTS):
        chunk = arith.xori(total(arith.divui(own.quad, number(2)), start % 64 // 8), own.octet)
        where = total(base, times(chunk, CHUNK_BYTES), (eight * of_row + start // 64) * 8 * ROW_BYTES)
        two = assembly(several(i32(), 2), [where], "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r")
        words = [llvm.extractvalue(i32(), two, [index]) for index in range(2)]
        takes = (f"prmt.b32 $0, $1, $2, {which};" for which in _ODD_AND_EVEN)
        found += [assembly(i32(), words, take, "=r,r,r", is_pure=True) for take in takes]
    return found


def _scales_of(outputs: int, dtype: Any) -> Callable[[Any], Any]:
    """float32 [outputs] of some scales outside of shared memory."""

    def load(_: Any, scales: Any) -> Any:
        layout, own, size = BY_ROW.to_mgpu(), Thread.own(), jnp.dtype(dtype).itemsize
        found = empty(layout, (outputs,))
        for index, place in enumerate(np.ndindex(found.shape)):
            tall, half = divmod(index, 2)
            row = total(times(own.warp, INPUTS), own.octet, tall * WIDE + half * 8)
            text = "ld.global.nc.f32 $0, [$1];"
            if size == 2:
                short = SHORT[jnp.dtype(dtype).name]
                text = f"{{ .reg .b16 scale; ld.global.nc.b16 scale, [$1]; cvt.f32.{short} $0, scale; }}"
            scale = assembly(ir.F32Type.get(), [place_in_memory(scales, row, size)], text, "=f,l")
            one = llvm.mlir_undef(ir.VectorType.get((1,), ir.F32Type.get()))
            found[place] = llvm.insertelement(one, scale, number(0))
        return fragments(found, layout)

    return in_registers((plgpu.RefType(),), plgpu.ShapeDtypeStruct((outputs,), jnp.float32, BY_ROW), load)
