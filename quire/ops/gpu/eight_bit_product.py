"""Products of rows with codes of eight bits, each read from memory once: a decode takes as long as that.

A program multiplies all rows by a block of outputs, run by run of inputs. Rows are the narrow side of the device's
products. Codes are widened in registers to the type of
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

PROGRAMS = 384  # that occupy a device


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


def blocks_of(rows: int, outputs: int, inputs: int) -> EightBitBlocks:
    """The fastest, or nearly so, of those that were compared on an H200, with 8 and 32 rows."""
    fills, is_few = outputs // 64 >= PROGRAMS, rows <= 16
    columns = 32 if is_few and not fills else 64
    most_programs, least_inputs = (512, 2048) if is_few else (PROGRAMS, 1024)
    splits = 1
    while -(-outputs // columns) * splits * 2 <= most_programs and inputs // (splits * 2) >= least_inputs:
        splits *= 2
    if is_few:
        return EightBitBlocks(8 if rows <= 8 else 16, columns, 256, splits, 2, 3 if fills else 4)
    return EightBitBlocks(power_of_two(rows), columns, 128 if fills else 256, splits, 2, 3)


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
        return sums + product(part, some, 1)

    steps = -(-inputs // blocks.inputs)
    each = -(-steps // blocks.splits)
    first = split * each
    end = first + each if steps % blocks.splits == 0 else jnp.minimum(first + each, steps)
    sums = jax.lax.fori_loop(first, end, add, jnp.zeros((blocks.columns, blocks.rows), jnp.float32))
    for ref in scale_refs:
        scales = ref[column] if is_output is None else plgpu.load(ref.at[column], mask=is_output, other=0.0)
        sums = sums * scales[:, None]
    mask = _both(is_output, is_row, sums.shape)
    plgpu.store(out_ref.at[split, row[None, :], column[:, None]], sums.astype(out_ref.dtype), mask=mask)


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
