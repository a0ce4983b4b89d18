"""Products of rows with codes of eight bits, each read from memory once: a decode takes as long as that.

A program multiplies all rows by a block of outputs, run by run of inputs. Codes are widened in registers to the type of
the rows, or to float16, which has all their numbers, for rows that are codes too. Where there are few outputs, several
programs share the inputs of a block, and their sums are added in a fixed order.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array, power_of_two, product, whole

WIDE = 64  # of the wide side of the device's largest products
PROGRAMS = 264  # that occupy a device: two for each multiprocessor of a large GPU
LEAST_INPUTS = 1024  # of a program: fewer would not fill the way from memory


# Four codes of e4m3 as bfloat16, through float32, two rounded together. Triton 3.6 has as many instructions for it, but
# rounds one at a time by another of them (F2F). To float16 it widens two by one instruction itself.
_WIDEN = """{ .reg .b16 low, high, first, second; .reg .b32 pair; .reg .f32 a, b;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 pair, low;
mov.b32 {first, second}, pair;
cvt.f32.f16 a, first;
cvt.f32.f16 b, second;
cvt.rn.bf16x2.f32 $0, b, a;
cvt.rn.f16x2.e4m3x2 pair, high;
mov.b32 {first, second}, pair;
cvt.f32.f16 a, first;
cvt.f32.f16 b, second;
cvt.rn.bf16x2.f32 $1, b, a; }"""


class EightBitBlocks(NamedTuple):
    rows: int  # of a product of blocks: all there are, or more
    columns: int  # outputs of a program
    inputs: int  # of a step
    splits: int  # programs that share the inputs of a block of outputs
    warps: int
    stages: int

    @property
    def is_turned(self) -> bool:
        """True where rows are the narrow side of the device's products. Of 64 or more they are the wide one."""
        return self.rows < WIDE


def blocks_of(rows: int, outputs: int, inputs: int) -> EightBitBlocks:
    columns = 64 if rows <= 16 else 128
    splits = 1
    while -(-outputs // columns) * splits * 2 <= PROGRAMS and inputs // (splits * 2) >= LEAST_INPUTS:
        splits *= 2
    if rows <= 16:
        return EightBitBlocks(8 if rows <= 8 else 16, columns, 256, splits, 2, 3)
    return EightBitBlocks(max(WIDE, power_of_two(rows)), columns, 128, splits, 4 if rows <= WIDE else 8, 3)


def eight_bit_product(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array | None = None,
    dtype: Any = jnp.float32,
    *,
    blocks: EightBitBlocks | None = None,
    is_plain: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """[t, outputs] of x [t, inputs] and codes [outputs, inputs], times scales [outputs], in `dtype`.

    Numbers of x have two bytes, or are e4m3 as the codes are. `is_plain`: codes are widened as Triton does it.
    """
    (rows, inputs), outputs = x.shape, len(codes)
    blocks = blocks or blocks_of(rows, outputs, inputs)
    assert blocks.rows >= rows, f"{rows} rows, blocks of {blocks.rows}"
    is_whole = blocks.splits == 1
    operands = (x, codes) if scales is None or not is_whole else (x, codes, scales)
    out = array((blocks.splits, rows, outputs), dtype if is_whole else jnp.float32)
    sums = pl.pallas_call(
        partial(_kernel, blocks, is_plain or interpret),
        grid=(-(-outputs // blocks.columns), blocks.splits),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name="eight_bit_product",
    )(*operands)
    total: jax.Array = sums[0]
    for split in range(1, blocks.splits):
        total = total + sums[split]
    return total if is_whole else (total if scales is None else total * scales).astype(dtype)


def _kernel(blocks: EightBitBlocks, is_plain: bool, x_ref: Any, codes_ref: Any, *refs: Any) -> None:
    *scale_refs, out_ref = refs
    split, (rows, inputs), outputs = pl.program_id(1), x_ref.shape, codes_ref.shape[0]
    row, column = jnp.arange(blocks.rows), pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns)
    is_row = None if rows == blocks.rows else row < rows
    is_output = None if outputs % blocks.columns == 0 else column < outputs
    dtype = jnp.dtype(jnp.float16) if x_ref.dtype.itemsize == 1 else x_ref.dtype

    def add(step: Any, sums: jax.Array) -> jax.Array:
        at = step * blocks.inputs + jnp.arange(blocks.inputs)
        is_input = None if inputs % blocks.inputs == 0 else at < inputs
        some = _widened(_load(x_ref, row, at, is_row, is_input), dtype, is_plain)
        part = _widened(_load(codes_ref, column, at, is_output, is_input), dtype, is_plain)
        return sums + (product(part, some, 1) if blocks.is_turned else product(some, part, 1))

    steps = -(-inputs // blocks.inputs)
    each = -(-steps // blocks.splits)
    first = split * each
    end = first + each if steps % blocks.splits == 0 else jnp.minimum(first + each, steps)
    shape = blocks.rows, blocks.columns
    sums = jax.lax.fori_loop(first, end, add, jnp.zeros(shape[::-1] if blocks.is_turned else shape, jnp.float32))
    for ref in scale_refs:
        scales = ref[column] if is_output is None else plgpu.load(ref.at[column], mask=is_output, other=0.0)
        sums = sums * (scales[:, None] if blocks.is_turned else scales[None, :])
    if blocks.is_turned:
        where, mask = (row[None, :], column[:, None]), _both(is_output, is_row, sums.shape)
    else:
        where, mask = (row[:, None], column[None, :]), _both(is_row, is_output, sums.shape)
    plgpu.store(out_ref.at[split, *where], sums.astype(out_ref.dtype), mask=mask)


def _widened(codes: jax.Array, dtype: Any, is_plain: bool) -> jax.Array:
    """Codes in this type; numbers of it stay."""
    if is_plain or codes.dtype != jnp.float8_e4m3fn or dtype != jnp.bfloat16:
        return codes.astype(dtype)
    given: Any = {"args": [jax.lax.bitcast_convert_type(codes, jnp.int8)], "constraints": "=r,=r,r", "pack": 4}
    like = [array(codes.shape, dtype)]
    (found,) = plgpu.elementwise_inline_asm(_WIDEN, result_shape_dtypes=like, **given)
    return found


def _load(ref: Any, first: jax.Array, second: jax.Array, has_first: Any, has_second: Any) -> jax.Array:
    where = ref.at[first[:, None], second[None, :]]
    mask = _both(has_first, has_second, (len(first), len(second)))
    if mask is None:
        return plgpu.load(where)
    return plgpu.load(where, mask=mask, other=jnp.zeros((), ref.dtype))


def _both(first: jax.Array | None, second: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """A mask of this shape of those along its axes; None where both are whole."""
    if first is None and second is None:
        return None
    found = jnp.broadcast_to(True if first is None else first[:, None], shape)
    return found if second is None else found & jnp.broadcast_to(second[None, :], shape)
