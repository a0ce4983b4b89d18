"""Eight-bit codes in `few_row_kernel`: how threads take, widen and multiply them.

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

from quire.ops.gpu.hopper.code_fragments import (
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
from quire.ops.gpu.hopper.memory_numbers import load_bits, widened
from quire.ops.gpu.hopper.row_fragments import COLUMNS, INPUTS, SHORT, Sums, adds_to_sums, multiply, twice, zero

LEAST_CHAINS = 4  # sums that a thread adds to in turn, so that one product need not wait for the last

# Two numbers, of the first or of the last two codes of $1. The bits of e4m3 are a bfloat16 that is 2 ** 120 too small,
# also where it has no leading one: the device multiplies such numbers by rows that are as much larger. The sign comes
# from a byte that is made of copies of it. A code of int8 without its highest bit is put into the last bits of a
# number, which count ones; that number, or 128 more, is subtracted.
_E4M3_TO_BFLOAT16 = """{
.reg .b32 codes;
prmt.b32 codes, $1, 0, SIGNED;
shl.b32 codes, codes, 4;
and.b32 $0, codes, 0x87f087f0;
}"""
_E4M3_TO_FLOAT16 = """{
.reg .b16 first, last;
mov.b32 {first, last}, $1;
cvt.rn.f16x2.e4m3x2 $0, TAKE;
}"""
_INT8 = """{
.reg .b32 codes, less;
prmt.b32 codes, $1, 0, PLAIN;
lop3.b32 less, codes, 0x00800080, BASE, 0xea;
lop3.b32 codes, codes, 0x007f007f, BASE, 0xea;
sub.rn.TYPEx2 $0, codes, less;
}"""
_BASES = {"bfloat16": 0x4300, "float16": 0x6400}
_SIGNED = "0x9180", "0xb3a2"  # each of two codes, and eight times its highest bit
_PLAIN = "0x4140", "0x4342"
_TAKE = "first", "last"
_LARGER_ROWS = 64  # of the powers of two, so that rows and products have room; sums get the others
_LARGER_SUMS = 120 - _LARGER_ROWS
_ENLARGE = f"{{ .reg .b32 power; mov.b32 power, {twice(127 + _LARGER_ROWS << 7)}; mul.rn.bf16x2 $0, $1, power; }}"


class EightBitSteps(NamedTuple):
    """The `Steps` of such codes: codes [outputs, width] and rows [tokens, width] in shared memory. NaN of e4m3, which
    no weight has, becomes 480. Beside e4m3 numbers of rows in bfloat16 are less than 2 ** 64."""

    width: int
    outputs: int
    pieces: int
    dtype: Any  # of rows
    code_dtype: Any

    @property
    def is_small(self) -> bool:
        """True for codes that become numbers which are too small."""
        return bool(self.code_dtype == jnp.float8_e4m3fn and self.dtype == jnp.bfloat16)

    def in_shared(self, places: int) -> list[Any]:
        shape = places, self.pieces, self.outputs // self.pieces, self.width
        return [plgpu.SMEM(shape, self.code_dtype, transforms=OF_CODES)]

    def slices(self, arrays: Sequence[Any], start: Any, at: Any) -> list[Any]:
        """Of codes [pieces, outputs of each, inputs]; scales [pieces, outputs of each] are not fetched."""
        return [arrays[0].at[:, pl.ds(start, self.outputs // self.pieces), pl.ds(at, self.width)]]

    def add(self, arrays: Sequence[Any], rows: Any, sums: jax.Array) -> jax.Array:
        tokens = sums.shape[1]

        def body(codes: Any, rows: Any, sums: Sums) -> None:
            _add_block(self, tokens // COLUMNS, codes, rows, sums)

        add = adds_to_sums((plgpu.RefType(OF_CODES),), self.outputs, tokens, body)
        added: jax.Array = add(*arrays, rows, sums)
        return added

    def scales(self, arrays: Sequence[Any], start: Any) -> jax.Array:
        scales = arrays[1]
        stride, each = scales.shape[1], self.outputs // self.pieces
        load = _scales_of(self, stride, scales.dtype)
        found: jax.Array = load(scales.at[:, pl.ds(start, each)])
        return found

    @property
    def unit(self) -> float:
        return 2.0**_LARGER_SUMS if self.is_small else 1.0

    def widened(self, word: Any, place: int) -> Any:
        """Two numbers of a word of four codes, the first or the last two."""
        name = jnp.dtype(self.dtype).name
        if self.code_dtype == jnp.int8:
            text = _INT8.replace("PLAIN", _PLAIN[place]).replace("BASE", twice(_BASES[name]))
        elif self.is_small:
            text = _E4M3_TO_BFLOAT16.replace("SIGNED", _SIGNED[place])
        else:
            text = _E4M3_TO_FLOAT16.replace("TAKE", _TAKE[place])
        return assembly(i32(), [word], text.replace("TYPE", SHORT[name]), "=r,r", is_pure=True)


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
    chunk = arith.xori(total(which, first % ROW_BYTES // CHUNK_BYTES), within)
    tile_bytes = 8 * ROW_BYTES
    eights = total(times(own.warp, 2), eight, tall * (WIDE // 8))
    where = total(address(codes), times(eights, steps.width // ROW_BYTES * tile_bytes), times(within, ROW_BYTES))
    return load_matrices(total(where, times(chunk, CHUNK_BYTES), first // ROW_BYTES * tile_bytes), is_turned=False)


def _inputs_of(steps: EightBitSteps, rows: Any, eight: int, first: int) -> list[Any]:
    """A thread's words of a row, two for each sixteen of 32 inputs: four neighbours."""
    own = Thread.own()
    of_row = steps.width // 64  # pieces of rows of shared memory, of two bytes each
    base = total(address(rows), times(own.octet, ROW_BYTES), times(arith.remui(own.quad, number(2)), 8))
    found = []
    for start in (first, first + INPUTS):
        chunk = arith.xori(total(arith.divui(own.quad, number(2)), start % 64 // 8), own.octet)
        where = total(base, times(chunk, CHUNK_BYTES), (eight * of_row + start // 64) * 8 * ROW_BYTES)
        two = assembly(several(i32(), 2), [where], "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r")
        words = [llvm.extractvalue(i32(), two, [index]) for index in range(2)]
        if steps.is_small:
            words = [assembly(i32(), [word], _ENLARGE, "=r,r", is_pure=True) for word in words]
        found += words
    return found


def _scales_of(steps: EightBitSteps, stride: int, dtype: Any) -> Callable[[Any], Any]:
    """float32 [outputs] of scales outside of shared memory, [pieces, outputs of each], those of a piece a stride on."""
    each = steps.outputs // steps.pieces // WIDE

    def load(_: Any, scales: Any) -> Any:
        layout, own = BY_ROW.to_mgpu(), Thread.own()
        found = empty(layout, (steps.outputs,))
        bits = []
        for index in range(found.size):
            tall, half = divmod(index, 2)
            piece, within = divmod(tall, each)
            where = total(times(own.warp, INPUTS), own.octet, piece * stride + within * WIDE + half * 8)
            bits.append(load_bits(scales, where, dtype))
        for one, place in zip(bits, np.ndindex(found.shape), strict=True):
            scale = llvm.mlir_undef(ir.VectorType.get((1,), ir.F32Type.get()))
            found[place] = llvm.insertelement(scale, widened(one, dtype), number(0))
        return fragments(found, layout)

    return in_registers((plgpu.RefType(),), plgpu.ShapeDtypeStruct((steps.outputs,), jnp.float32, BY_ROW), load)
