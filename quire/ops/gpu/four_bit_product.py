"""Products of few rows with four-bit weights, read from memory as they are stored: a decode takes as long as that.

A program multiplies all rows by a block of outputs, run by run of inputs: codes less their zero point are whole
numbers, exact in every float, and the sum of a group is multiplied by its scale. An element has codes of four runs, so
each of its four places meets a run of every row. Where there are few outputs, several programs share the inputs of a
block, and their sums are added in a fixed order.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array, least_dot, product, whole
from quire.ops.weights.four_bits import PLACES, TILE, FourBits
from quire.ops.weights.rounded_rows import Rows
from quire.ops.weights.weight import flat_rows

MOST_ROWS = 64
COLUMNS = 64
PROGRAMS = 528  # that occupy a device: four for each multiprocessor of a large GPU
LEAST_STEPS = 4  # of a program: fewer would not fill the way from memory

# The codes of one place of two elements as floats, less their zero points. The last bits of `ABOVE` count ones, so a
# code in them makes ABOVE + code; the zero point comes as -(ABOVE + zero), and the sum is exact.
_WIDEN = """{
.reg .b32 codes, one;
mov.b32 one, ONE;
shr.u32 codes, $1, SHIFT;
lop3.b32 codes, codes, 0x000f000f, ABOVE, 0xea;
fma.rn.TYPE $0, codes, one, $2;
}"""
_ABOVE = {"bfloat16": 128, "float16": 1024}
_TEXTS = {
    "bfloat16": {"TYPE": "bf16x2", "ONE": "0x3f803f80", "ABOVE": "0x43004300"},
    "float16": {"TYPE": "f16x2", "ONE": "0x3c003c00", "ABOVE": "0x64006400"},
}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "factors"],
    meta_fields=["shape", "num_contracted", "group", "scale_dtype"],
)
@dataclass(frozen=True)
class GPUFourBits(FourBits):
    """`FourBits` with this product of few rows."""

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        rows = flat_rows(x)
        is_few = len(rows) <= MOST_ROWS and rows.dtype.itemsize == 2
        return four_bit_product(rows, self) if is_few else self.widened_product(rows)


class FourBitBlocks(NamedTuple):
    rows: int
    columns: int  # outputs of a program
    splits: int  # programs that share the inputs of a block of outputs
    warps: int
    stages: int


def blocks_of(rows: int, outputs: int, steps: int) -> FourBitBlocks:
    """The inputs are shared alike for every number of rows."""
    splits = 1
    while outputs // COLUMNS * splits * 2 <= PROGRAMS and steps // (splits * 2) >= LEAST_STEPS:
        splits *= 2
    return FourBitBlocks(least_dot(rows), COLUMNS, splits, 2 if rows <= 32 else 4, 4)


def four_bit_product(
    x: jax.Array, weight: FourBits, *, blocks: FourBitBlocks | None = None, interpret: bool = False
) -> jax.Array:
    """float32 [t, outputs] of at most `MOST_ROWS` x [t, inputs], numbers of two bytes."""
    rows, inputs = x.shape
    outputs = weight.factors.shape[1]
    blocks = blocks or blocks_of(rows, outputs, inputs // (PLACES * weight.run))
    operands = (x, weight.codes, weight.factors)
    out = array((blocks.splits, rows, outputs), jnp.float32)
    sums = pl.pallas_call(
        partial(_kernel, blocks, weight.group, weight.run, weight.scale_dtype, interpret),
        grid=(-(-outputs // blocks.columns), blocks.splits),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="four_bit_product",
    )(*operands)
    total: jax.Array = sums[0]
    for split in range(1, blocks.splits):
        total = total + sums[split]
    return total


def _kernel(
    blocks: FourBitBlocks,
    group: int,
    run: int,
    scale_dtype: Any,
    interpret: bool,
    x_ref: Any,
    codes_ref: Any,
    factors_ref: Any,
    out_ref: Any,
) -> None:
    split, (rows, inputs), outputs = pl.program_id(1), x_ref.shape, factors_ref.shape[1]
    row, column = jnp.arange(blocks.rows), pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns)
    is_output = None if outputs % blocks.columns == 0 else column < outputs
    is_row = jnp.broadcast_to((row < rows)[:, None], (blocks.rows, run))
    tile, of_tile = jax.lax.div(column, TILE), jax.lax.rem(column, TILE)
    size = PLACES * run

    def add_step(step: Any, sums: jax.Array) -> jax.Array:
        where = tile[:, None], step, of_tile[:, None], jnp.arange(run)[None, :]
        elements = _load(codes_ref, where, is_output, run)
        total, factors = jnp.zeros_like(sums), jnp.zeros(blocks.columns, jnp.int32)
        for place in range(PLACES):
            first = place * run
            if first % group == 0:
                factors = _load(factors_ref, (jax.lax.div(step * size + first, group), column), is_output)
                total = jnp.zeros_like(sums)
            at = step * size + first + jnp.arange(run)
            some = plgpu.load(x_ref.at[row[:, None], at[None, :]], mask=is_row, other=0.0)
            total = total + product(_widened(elements, place, factors, x_ref.dtype, interpret), some, 1)
            if (first + run) % min(group, size) == 0:
                sums = sums + total * _scales(factors, scale_dtype)[:, None]
        return sums

    steps = inputs // size
    each = -(-steps // blocks.splits)
    first, end = split * each, jnp.minimum((split + 1) * each, steps)
    sums = jax.lax.fori_loop(first, end, add_step, jnp.zeros((blocks.columns, blocks.rows), jnp.float32))
    mask = (row < rows)[None, :] & (True if is_output is None else is_output[:, None])
    where = out_ref.at[split, row[None, :], column[:, None]]
    plgpu.store(where, sums, mask=jnp.broadcast_to(mask, sums.shape))


def _load(ref: Any, where: tuple[Any, ...], is_output: jax.Array | None, *sizes: int) -> jax.Array:
    """Integers of outputs that are there."""
    if is_output is None:
        return plgpu.load(ref.at[where])
    mask = jnp.broadcast_to(is_output.reshape(-1, *[1] * len(sizes)), (len(is_output), *sizes))
    return plgpu.load(ref.at[where], mask=mask, other=0)


def _scales(factors: jax.Array, dtype: Any) -> jax.Array:
    """float32 of the higher halves."""
    if dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(factors & -65536, jnp.float32)
    halves = jax.lax.shift_right_logical(factors, 16).astype(jnp.int16)
    return jax.lax.bitcast_convert_type(halves, dtype).astype(jnp.float32)


def _widened(elements: jax.Array, place: int, factors: jax.Array, dtype: Any, interpret: bool) -> jax.Array:
    """The codes of a place [outputs, run] less the zero points: whole numbers."""
    zeros = (factors & 0xFFFF).astype(jnp.float32)
    shift = 4 * place
    if interpret:
        codes = (elements.astype(jnp.int32) >> shift) & 15
        return (codes.astype(jnp.float32) - zeros[:, None]).astype(dtype)
    offsets = jnp.broadcast_to((-_ABOVE[dtype.name] - zeros).astype(dtype)[:, None], elements.shape)
    text = _WIDEN.replace("SHIFT", str(shift))
    for name, value in _TEXTS[dtype.name].items():
        text = text.replace(name, value)
    given: Any = {"args": [elements, offsets], "constraints": "=r,r,r", "pack": 2}
    (numbers,) = plgpu.elementwise_inline_asm(text, result_shape_dtypes=[array(elements.shape, dtype)], **given)
    return numbers
