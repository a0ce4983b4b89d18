"""Eight-bit codes in `few_row_kernel`: how threads load, widen and multiply them.

A thread gets four neighbouring codes of an output at a time, in the order of `ldmatrix`, and the same inputs of a row.
So the device multiplies inputs in another order than they have in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
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
from quire.ops.gpu.hopper.row_fragments import (
    COLUMNS,
    INPUTS,
    SHORT,
    Sums,
    adds_to_sums,
    load_bits,
    multiply,
    single,
    twice,
    widened,
    zero,
)

LEAST_CHAINS = 4  # sums that a thread adds to in turn, so that a product need not wait for the one before

# Two numbers, of the first or of the last two codes of $1. The bits of e4m3, shifted, are a bfloat16 that is 2 ** 120
# too small, subnormal numbers included; rows and sums are multiplied by that power. The sign comes from a byte that is
# eight copies of it. A code of int8 without its highest bit goes into the last bits of a number, which count ones; that
# number, or 128 more, is subtracted.
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
_SIGNED = "0x9180", "0xb3a2"  # two codes, each after a byte of copies of its sign
_PLAIN = "0x4140", "0x4342"
_TAKE = "first", "last"
_LARGER_ROWS = 64  # the part of the power of two that rows get, so that rows and products stay in range
_LARGER_SUMS = 120 - _LARGER_ROWS
_ENLARGE = f"{{ .reg .b32 power; mov.b32 power, {twice(127 + _LARGER_ROWS << 7)}; mul.rn.bf16x2 $0, $1, power; }}"


class EightBitSteps(NamedTuple):
    """The `Steps` of such codes: codes [outputs, width] and rows [tokens, width] in shared memory. NaN of e4m3, which
    no weight has, becomes 480. With e4m3, numbers of rows in bfloat16 must be less than 2 ** 64."""

    width: int
    outputs: int
    pieces: int
    dtype: Any  # of rows
    code_dtype: Any

    @property
    def is_small(self) -> bool:
        """True if widened codes are too small by a power of two."""
        return bool(self.code_dtype == jnp.float8_e4m3fn and self.dtype == jnp.bfloat16)

    def in_shared(self, places: int) -> list[Any]:
        shape = places, self.pieces, self.outputs // self.pieces, self.width
        return [plgpu.SMEM(shape, self.code_dtype, transforms=OF_CODES)]

    def slices(self, arrays: Sequence[Any], start: Any, at: Any) -> list[Any]:
        """Codes [pieces, outputs of each, inputs]; scales [pieces, outputs of each] are not fetched in blocks."""
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
        own: jax.Array = load(scales.at[:, pl.ds(start, each)])
        return own

    @property
    def unit(self) -> float:
        return 2.0**_LARGER_SUMS if self.is_small else 1.0

    def widened(self, word: Any, place: int) -> Any:
        """The first or the last two numbers of a word of four codes."""
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
    of_chains: dict[tuple[int, int, int], list[Any]] = {}  # sums by 64 outputs, by eight rows and by chain
    for first in range(0, steps.width, 2 * INPUTS):
        inputs = [_inputs_of(steps, rows, eight, first) for eight in range(eights)]
        for tall in range(talls):
            words = _words_of(steps, codes, tall, first)
            for index in range(2):
                two = words[2 * index : 2 * index + 2]  # of the halves of a tile
                wide = [steps.widened(word, place) for place in range(2) for word in two]
                for eight in range(eights):
                    chain = tall, eight, (first // INPUTS + index) % chains
                    before = of_chains.get(chain) or [zero()] * 4
                    of_chains[chain] = multiply(steps.dtype, wide, inputs[eight][2 * index : 2 * index + 2], before)
    for (tall, eight, _), four in of_chains.items():
        for index, value in enumerate(four):
            half, which = divmod(index, 2)
            sums[tall, eight, half, which] = arith.addf(sums[tall, eight, half, which], value)


def _words_of(steps: EightBitSteps, codes: Any, tall: int, first: int) -> list[Any]:
    """A thread's words of codes: for each sixteen of 32 inputs, both halves of its tile."""
    own = Thread.own()
    row, which = arith.remui(own.lane, number(INPUTS)), arith.divui(own.lane, number(INPUTS))
    eight, within = arith.divui(row, number(8)), arith.remui(row, number(8))
    chunk = arith.xori(total(which, first % ROW_BYTES // CHUNK_BYTES), within)
    tile_bytes = 8 * ROW_BYTES
    eights = total(times(own.warp, 2), eight, tall * (WIDE // 8))
    where = total(address(codes), times(eights, steps.width // ROW_BYTES * tile_bytes), times(within, ROW_BYTES))
    return load_matrices(total(where, times(chunk, CHUNK_BYTES), first // ROW_BYTES * tile_bytes), is_turned=False)


def _inputs_of(steps: EightBitSteps, rows: Any, eight: int, first: int) -> list[Any]:
    """A thread's words of a row: for each sixteen of 32 inputs, two words of four neighbours."""
    own = Thread.own()
    of_row = steps.width // 64  # pieces of a row in shared memory, 64 numbers each
    base = total(address(rows), times(own.octet, ROW_BYTES), times(arith.remui(own.quad, number(2)), 8))
    all_words = []
    for start in (first, first + INPUTS):
        chunk = arith.xori(total(arith.divui(own.quad, number(2)), start % 64 // 8), own.octet)
        where = total(base, times(chunk, CHUNK_BYTES), (eight * of_row + start // 64) * 8 * ROW_BYTES)
        two = assembly(several(i32(), 2), [where], "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r")
        words = [llvm.extractvalue(i32(), two, [index]) for index in range(2)]
        if steps.is_small:
            words = [assembly(i32(), [word], _ENLARGE, "=r,r", is_pure=True) for word in words]
        all_words += words
    return all_words


def _scales_of(steps: EightBitSteps, stride: int, dtype: Any) -> Callable[[Any], Any]:
    """Loads float32 [outputs] from scales [pieces, outputs of each] in global memory. `stride`: from a piece to the
    next."""
    each = steps.outputs // steps.pieces // WIDE

    def load(_: Any, scales: Any) -> Any:
        layout, own = BY_ROW.to_mgpu(), Thread.own()
        registers = empty(layout, (steps.outputs,))
        bits = []
        for index in range(registers.size):
            tall, half = divmod(index, 2)
            piece, within = divmod(tall, each)
            where = total(times(own.warp, INPUTS), own.octet, piece * stride + within * WIDE + half * 8)
            bits.append(load_bits(scales, where, dtype))
        for scale_bits, place in zip(bits, np.ndindex(registers.shape), strict=True):
            registers[place] = single(widened(scale_bits, dtype))
        return fragments(registers, layout)

    return in_registers((plgpu.RefType(),), plgpu.ShapeDtypeStruct((steps.outputs,), jnp.float32, BY_ROW), load)
