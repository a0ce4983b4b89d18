"""Four-bit codes in `few_row_kernel`: how threads load, widen and multiply them.

A thread gets elements in the order of `ldmatrix`. A word of two elements has two inputs in each of four places. Sums
count in `Units`. Up to `MOST_BY_WARP` rows each warp multiplies by itself; with more, the warps of a group multiply
together (`wgmma`).
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from quire.ops.gpu.hopper.code_fragments import (
    BY_PRODUCT,
    BY_ROW,
    CHUNK_BYTES,
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
    times,
    total,
)
from quire.ops.gpu.hopper.few_row_blocks import MOST_BY_WARP
from quire.ops.gpu.hopper.row_fragments import (
    COLUMNS,
    INPUTS,
    SHORT,
    Sums,
    adds_to_sums,
    by_place,
    multiply,
    single,
    twice,
    zero,
)
from quire.ops.weights.four_bits import PLACES, TILE

CHAINS = 2
WORD_BYTES = 4


class Units(NamedTuple):
    """The numbers with which codes become floats. A code alone in the bits of an element is a subnormal float; a code
    four bits higher is sixteen times as much. Times a power of two, less the zero point, it is exact."""

    powers: tuple[int, int]  # their bits, for a code in the lowest four bits and for one in the next
    above: int  # bits of a float whose last bits count ones: or'ed with a zero point, it is above + zero point
    less: int  # bits of -unit
    rest: int  # bits of above in units
    inverse: float  # 1 / unit


UNITS = {
    "bfloat16": Units((0x7F00, 0x7D00), 0x4300, 0xBC80, 0x4000, 64.0),
    "float16": Units((0x6C00, 0x5C00), 0x6400, 0x8C00, 0x3400, 4096.0),
}

_WIDEN = """{
.reg .b32 codes, power;
SHIFTED
and.b32 codes, codes, MASK;
mov.b32 power, POWER;
fma.rn.TYPEx2 $0, codes, power, $2;
}"""
_OFFSET = """{
.reg .b32 zeros, less, rest;
prmt.b32 zeros, $1, 0, 0x1010;
or.b32 zeros, zeros, ABOVE;
mov.b32 less, LESS;
mov.b32 rest, REST;
fma.rn.TYPEx2 $0, zeros, less, rest;
}"""


class FourBitSteps(NamedTuple):
    """The `Steps` of such codes. A block in shared memory: elements [tiles, num_steps * TILE, run], factors [groups,
    outputs] and rows [tokens, width]. Tiles and outputs of all pieces follow each other."""

    run: int
    group: int
    num_steps: int
    outputs: int
    pieces: int
    dtype: Any  # of rows
    scale_dtype: Any

    @property
    def size(self) -> int:
        """Inputs of a step."""
        return PLACES * self.run

    @property
    def width(self) -> int:
        return self.num_steps * self.size

    @property
    def groups(self) -> int:
        return max(1, self.width // self.group)

    @property
    def of_codes(self) -> tuple[Any, Any]:
        return plgpu.TilingTransform((8, self.run)), plgpu.SwizzleTransform(2 * self.run)

    def in_shared(self, places: int) -> list[Any]:
        each = self.outputs // self.pieces
        elements = places, self.pieces, each // TILE, self.num_steps * TILE, self.run
        return [
            plgpu.SMEM(elements, jnp.int16, transforms=self.of_codes),
            plgpu.SMEM((places, self.groups, self.pieces, each), jnp.int32),
        ]

    def slices(self, arrays: Sequence[Any], start: Any, at: Any) -> list[Any]:
        """Of elements [pieces, tiles, steps * TILE, run] and factors [groups, pieces, outputs]."""
        codes, factors = arrays
        each = self.outputs // self.pieces
        tiles, groups = pl.ds(lax.div(start, TILE), each // TILE), pl.ds(lax.div(at, self.group), self.groups)
        elements = pl.ds(lax.div(at, self.size) * TILE, self.num_steps * TILE)
        return [codes.at[:, tiles, elements], factors.at[groups, :, pl.ds(start, each)]]

    def add(self, arrays: Sequence[Any], rows: Any, sums: jax.Array) -> jax.Array:
        codes, factors = arrays
        tokens = sums.shape[1]
        if tokens > MOST_BY_WARP:
            return _add_by_group(self, (codes, factors, rows), sums)
        added: jax.Array = _add_by_warp(self, tokens)(codes, factors, rows, sums)
        return added

    def scales(self, arrays: Sequence[Any], start: Any) -> None:
        """The sums include them."""

    @property
    def unit(self) -> float:
        return self.units.inverse

    @property
    def units(self) -> Units:
        return UNITS[jnp.dtype(self.dtype).name]

    @property
    def type_name(self) -> str:
        """The type of rows in assembly."""
        return SHORT[jnp.dtype(self.dtype).name]

    def group_of(self, first: int) -> int:
        """The group of an input of the block."""
        return first // self.group if self.groups > 1 else 0

    def factor(self, factors: Any, group: int, tall: int, half: int) -> Any:
        """A thread's factor of a group, for a row of its tile."""
        own = Thread.own()
        row = total(times(own.warp, TILE), own.octet, group * self.outputs + tall * WIDE + half * 8)
        where = total(address(factors), times(row, WORD_BYTES))
        return assembly(i32(), [where], "ld.shared.b32 $0, [$1];", "=r,r")

    def elements(self, codes: Any, at: int, tall: int) -> list[list[Any]]:
        """A thread's words of a step, four of each sixteen elements, in the order of the device's product."""
        row_bytes = 2 * self.run
        chunks, shift = row_bytes // CHUNK_BYTES, (ROW_BYTES // row_bytes).bit_length() - 1
        own = Thread.own()
        row, which = arith.remui(own.lane, number(TILE)), arith.divui(own.lane, number(TILE))
        swapped = arith.andi(arith.shrui(row, number(shift)), number(chunks - 1))
        tile = total(own.warp, 4 * tall)
        base = total(address(codes), times(tile, self.num_steps * TILE * row_bytes), times(row, row_bytes))
        words = []
        for first in range(0, chunks, 2):
            chunk = times(arith.xori(total(which, first), swapped), CHUNK_BYTES)
            words.append(load_matrices(total(base, chunk, at * TILE * row_bytes), is_turned=False))
        return words

    def widened(self, word: Any, offset: Any, place: int) -> Any:
        """Two codes of a word, less their zero points, as floats in units."""
        text = _WIDEN.replace("SHIFTED", "shr.u32 codes, $1, 8;" if place >= 2 else "mov.b32 codes, $1;")
        text = text.replace("MASK", twice(0xF << 4 * (place % 2)))
        text = text.replace("POWER", twice(self.units.powers[place % 2]))
        return assembly(i32(), [word, offset], text.replace("TYPE", self.type_name), "=r,r,r", is_pure=True)

    def offset(self, factor: Any) -> Any:
        """A word with twice the negative zero point."""
        units = self.units
        text = _OFFSET.replace("ABOVE", twice(units.above)).replace("LESS", twice(units.less))
        text = text.replace("REST", twice(units.rest)).replace("TYPE", self.type_name)
        return assembly(i32(), [factor], text, "=r,r", is_pure=True)

    def scale(self, factor: Any) -> Any:
        kind = ir.F32Type.get()
        if self.scale_dtype == jnp.bfloat16:
            return llvm.bitcast(kind, arith.andi(factor, number(-(1 << 16))))
        text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, high; }"
        return assembly(kind, [factor], text, "=f,r", is_pure=True)


def _widened(steps: FourBitSteps, at: int) -> Callable[[Any, Any], Any]:
    """Codes [outputs, inputs] of a step, less their zero points, in units. The step lies within one group."""

    def widen(_: Any, codes: Any, factors: Any) -> Any:
        layout = BY_PRODUCT.to_mgpu()
        registers = empty(layout, (steps.outputs, steps.size))
        places = by_place(registers)
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(steps.dtype))
        group = steps.group_of(at * steps.size)
        for tall in range(steps.outputs // WIDE):
            offsets = [steps.offset(steps.factor(factors, group, tall, half)) for half in range(2)]
            for sixteen, words in enumerate(steps.elements(codes, at, tall)):
                for place in range(PLACES):
                    first = (place * steps.run + sixteen * INPUTS) // 8
                    for index, word in enumerate(words):
                        floats = steps.widened(word, offsets[index % 2], place)
                        registers[places[tall, first + index // 2, index % 2]] = utils.bitcast(floats, pair)
        return fragments(registers, layout)

    result = plgpu.ShapeDtypeStruct((steps.outputs, steps.size), steps.dtype, BY_PRODUCT)
    return in_registers((plgpu.RefType(steps.of_codes), plgpu.RefType()), result, widen)


def _scales_of(steps: FourBitSteps, at: int) -> Callable[[Any], Any]:
    """The scales of a step, float32 [outputs]."""

    def load(_: Any, factors: Any) -> Any:
        layout = BY_ROW.to_mgpu()
        registers = empty(layout, (steps.outputs,))
        for index, where in enumerate(np.ndindex(registers.shape)):
            factor = steps.factor(factors, steps.group_of(at * steps.size), *divmod(index, 2))
            registers[where] = single(steps.scale(factor))
        return fragments(registers, layout)

    return in_registers((plgpu.RefType(),), plgpu.ShapeDtypeStruct((steps.outputs,), jnp.float32, BY_ROW), load)


def _add_by_warp(steps: FourBitSteps, tokens: int) -> Callable[..., Any]:
    """Each warp loads all rows, and multiplies its outputs tile by tile."""

    def add(codes: Any, factors: Any, rows: Any, sums: Sums) -> None:
        for at in range(steps.num_steps):
            _add_step(steps, at, (codes, factors), _rows_of(steps, rows, at, tokens), sums)

    return adds_to_sums((plgpu.RefType(steps.of_codes), plgpu.RefType()), steps.outputs, tokens, add)


def _rows_of(steps: FourBitSteps, rows: Any, at: int, tokens: int) -> list[list[list[Any]]]:
    """A thread's words of rows: by eight rows, then by sixteen inputs of a step."""
    own = Thread.own()
    row, matrix = arith.remui(own.lane, number(8)), arith.divui(own.lane, number(8))
    halves = []  # of a row of shared memory
    for first in (0, 4):
        chunk = times(arith.xori(total(matrix, first), row), CHUNK_BYTES)
        halves.append(total(address(rows), times(row, ROW_BYTES), chunk))
    of_eights: list[list[list[Any]]] = []
    for eight in range(tokens // COLUMNS):
        of_eights.append([])
        for first in range(at * steps.size, (at + 1) * steps.size, 2 * INPUTS):
            where = (eight * (steps.width // 64) + first // 64) * 8 * ROW_BYTES
            words = load_matrices(total(halves[first % 64 // 32], where), is_turned=False)
            of_eights[-1] += [words[:2], words[2:]]
    return of_eights


def _add_step(steps: FourBitSteps, at: int, weight: tuple[Any, Any], rows: list[list[list[Any]]], sums: Sums) -> None:
    kind, (codes, factors) = ir.F32Type.get(), weight
    for tall in range(steps.outputs // WIDE):
        # Sums by group, by eight rows and by chain: with several chains a product need not wait for the one before.
        of_groups: dict[tuple[int, int, int], list[Any]] = {}
        scales: dict[int, list[Any]] = {}  # by group, for both halves of a tile
        offsets: dict[int, list[Any]] = {}
        for sixteen, words in enumerate(steps.elements(codes, at, tall)):
            for place in range(PLACES):
                first = place * steps.run + sixteen * INPUTS
                group = steps.group_of(at * steps.size + first)
                if group not in scales:
                    both = [steps.factor(factors, group, tall, half) for half in range(2)]
                    scales[group] = [steps.scale(factor) for factor in both]
                    offsets[group] = [steps.offset(factor) for factor in both]
                wide = [steps.widened(word, offsets[group][index % 2], place) for index, word in enumerate(words)]
                for eight, inputs in enumerate(rows):
                    chain = group, eight, sixteen % CHAINS
                    before = of_groups.get(chain) or [zero()] * 4
                    of_groups[chain] = multiply(steps.dtype, wide, inputs[first // INPUTS], before)
        for group, eight in dict.fromkeys(chain[:2] for chain in of_groups):
            chains = [of_groups[group, eight, at] for at in range(CHAINS) if (group, eight, at) in of_groups]
            for index, several in enumerate(zip(*chains, strict=True)):
                half, which = divmod(index, 2)
                given = [reduce(arith.addf, several), scales[group][half], sums[tall, eight, half, which]]
                sums[tall, eight, half, which] = assembly(
                    kind, given, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", is_pure=True
                )


def _add_by_group(steps: FourBitSteps, block: tuple[Any, Any, Any], sums: jax.Array) -> jax.Array:
    codes, factors, rows = block
    for at in range(steps.num_steps):
        numbers, scales = _widened(steps, at)(codes, factors), _scales_of(steps, at)(factors)

        def multiply_step(accumulator: Any, numbers: jax.Array = numbers, at: int = at) -> Any:
            plgpu.wgmma(accumulator, numbers, rows.at[:, pl.ds(at * steps.size, steps.size)].transpose((1, 0)))
            return accumulator[...]

        added: jax.Array = pl.run_scoped(multiply_step, plgpu.WGMMAAccumulatorRef((steps.outputs, sums.shape[1])))
        sums = sums + added * lax.broadcast_in_dim(scales, added.shape, (0,))
    return sums
