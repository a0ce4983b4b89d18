"""Products of few rows with four-bit weights, read from memory as they are stored: a decode takes as long as that.

A program multiplies all rows by a block of outputs, group by group of inputs: codes less their zero point are whole
numbers, exact in every float, and the sum of a group is multiplied by its scale. A byte has the codes of two
neighbouring inputs, so rows come in pairs too, and a block is two products. Where there are few outputs, several
programs share the groups of a block, and their sums are added in a fixed order.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.coded import MIDDLE, Coded
from quire.ops.gpu.tiles import array, least_dot, product, whole

PAIR = 2  # codes of a byte
MOST_ROWS = 64
GROUPS = (32, 64, 128, 256)  # inputs that share a scale: a block of them
PROGRAMS = 1056  # that occupy a device: eight for each multiprocessor of a large GPU
LEAST_GROUPS = 4  # of a program: fewer would not fill the way from memory

# bfloat16 of the lower codes of four bytes, less two of their zero points each time. The last bits of 128 count ones,
# so a code that is put there is 128 + code; the zero point comes as -(128 + zero), and the sum is exact.
_WIDEN = """{
.reg .b32 codes, pair, one;
mov.b32 one, 0x3f803f80;
shr.u32 codes, $2, SHIFT;
and.b32 codes, codes, 0x0f0f0f0f;
prmt.b32 pair, codes, 0x43434343, 0x5140;
fma.rn.bf16x2 $0, pair, one, $3;
prmt.b32 pair, codes, 0x43434343, 0x7362;
fma.rn.bf16x2 $1, pair, one, $4;
}"""
_ABOVE = 128  # a bfloat16 whose last bit counts ones


class Blocks(NamedTuple):
    rows: int
    columns: int  # outputs of a program
    splits: int  # programs that share the inputs of a block of outputs
    warps: int
    stages: int


def blocks_of(rows: int, outputs: int, groups: int) -> Blocks:
    columns = 64 if rows <= 32 else 32
    splits = 1
    while outputs // columns * splits * 2 <= PROGRAMS and groups // (splits * 2) >= LEAST_GROUPS:
        splits *= 2
    return Blocks(least_dot(rows), columns, splits, 4, 4)


def fits(x: jax.Array, weight: Coded) -> bool:
    """True for weights that the kernel reads: groups in their order, and rows that are numbers of two bytes."""
    is_plain = weight.bits == 4 and weight.index is None and weight.rounding is None and not weight.is_of_experts
    has_floats = weight.scales.dtype != jnp.uint8  # or else codes are floats
    is_whole = weight.group in GROUPS and x.shape[-1] == weight.group * weight.scales.shape[-1]
    return is_plain and has_floats and is_whole and len(x) <= MOST_ROWS and x.dtype.itemsize == 2


def four_bit_product(
    x: jax.Array, weight: Coded, *, blocks: Blocks | None = None, interpret: bool = False
) -> jax.Array:
    """float32 [t, outputs] of x [t, inputs] with a weight that `fits`."""
    rows, inputs = x.shape
    codes = weight.codes.reshape(-1, inputs // PAIR)
    groups, outputs = weight.scales.shape[-1], len(codes)
    blocks = blocks or blocks_of(rows, outputs, groups)
    pairs = jax.lax.bitcast_convert_type(x.reshape(rows, -1, PAIR), jnp.int32)
    operands = [pairs, codes, weight.scales.reshape(-1, groups)]
    operands += [] if weight.zeros is None else [weight.zeros.reshape(-1, groups)]
    out = array((blocks.splits, rows, outputs), jnp.float32)
    sums = pl.pallas_call(
        partial(_kernel, blocks, weight.group, x.dtype, interpret),
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
    blocks: Blocks, group: int, dtype: Any, interpret: bool, x_ref: Any, codes_ref: Any, scales_ref: Any, *refs: Any
) -> None:
    *zeros_refs, out_ref = refs
    split, rows, outputs = pl.program_id(1), x_ref.shape[0], codes_ref.shape[0]
    size, groups = group // PAIR, scales_ref.shape[1]
    row, column = jnp.arange(blocks.rows), pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns)
    is_output = None if outputs % blocks.columns == 0 else column < outputs
    each = -(-groups // blocks.splits)

    def load(ref: Any, where: Any, shape: tuple[int, ...]) -> jax.Array:
        """Of outputs that are there."""
        if is_output is None:
            return plgpu.load(ref.at[where])
        there = jnp.broadcast_to(is_output.reshape(-1, *[1] * (len(shape) - 1)), shape)
        other = 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0
        return plgpu.load(ref.at[where], mask=there, other=other)

    def add(index: Any, sums: jax.Array) -> jax.Array:
        at = index * size + jnp.arange(size)
        is_row = jnp.broadcast_to((row < rows)[:, None], (blocks.rows, size))
        found = plgpu.load(x_ref.at[row[:, None], at[None, :]], mask=is_row, other=0)
        halves = (found & 0xFFFF, jax.lax.shift_right_logical(found, 16))
        some = [jax.lax.bitcast_convert_type(half.astype(jnp.int16), dtype) for half in halves]
        codes = load(codes_ref, (column[:, None], at[None, :]), (blocks.columns, size))
        zeros = jnp.full(blocks.columns, MIDDLE, jnp.float32)
        if zeros_refs:
            zeros = load(zeros_refs[0], (column, index), (blocks.columns,)).astype(jnp.float32)
        total = jnp.zeros_like(sums)
        for numbers, part in zip(_widened(codes, zeros, dtype, interpret), some, strict=True):
            total = total + product(numbers, part, 1)
        scales = load(scales_ref, (column, index), (blocks.columns,)).astype(jnp.float32)
        return sums + total * scales[:, None]

    first, end = split * each, jnp.minimum((split + 1) * each, groups)
    sums = jax.lax.fori_loop(first, end, add, jnp.zeros((blocks.columns, blocks.rows), jnp.float32))
    mask = (row < rows)[None, :] & (True if is_output is None else is_output[:, None])
    where = out_ref.at[split, row[None, :], column[:, None]]
    plgpu.store(where, sums, mask=jnp.broadcast_to(mask, sums.shape))


def _widened(codes: jax.Array, zeros: jax.Array, dtype: Any, interpret: bool) -> list[jax.Array]:
    """The lower and the higher codes [outputs, bytes] less the zero points [outputs]: whole numbers."""
    if interpret or dtype != jnp.bfloat16:
        wide = codes.astype(jnp.int32)
        return [(code.astype(jnp.float32) - zeros[:, None]).astype(dtype) for code in (wide & 15, wide >> 4)]
    offsets = jnp.broadcast_to((-_ABOVE - zeros).astype(dtype)[:, None], codes.shape)
    like = [array(codes.shape, dtype)]
    given: Any = {"args": [codes, offsets], "constraints": "=&r,=&r,r,r,r", "pack": 4, "result_shape_dtypes": like}
    texts = (_WIDEN.replace("SHIFT", shift) for shift in ("0", "4"))
    return [plgpu.elementwise_inline_asm(text, **given)[0] for text in texts]
