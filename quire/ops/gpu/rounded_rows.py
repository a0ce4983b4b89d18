"""Rows rounded to eight bits in the launch that makes them, where XLA reads and writes them up to four times.

A program has a row, in blocks that stay in registers until the largest number of the row is known.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array, power_of_two, whole
from quire.ops.norms import rms_norm
from quire.ops.weights.rounded_rows import (
    Activation,
    RoundedRows,
    ScaledSums,
    Sums,
    gated_values,
    nearest_codes,
    row_scale,
)

BLOCK = 2048  # numbers that a program handles together, eight for each thread
MOST_BLOCKS = 16  # a longer row has more threads, so that their registers suffice
AHEAD = MOST_BLOCKS  # blocks that a gate loads ahead; fewer take fewer registers
MANY_BLOCK = 1024  # for a gate of more than FEW_ROWS: four numbers for each thread
FEW_ROWS = 128  # of a gate: a multiprocessor has one of them at most, and a row gets more threads
# Policies of the first cache: scales of columns and factors of norms are read for every row, and rows once.
STAYS, LEAVES = "evict_last", "evict_first"
ALL_BUT_SIGN = 0x7FFFFFFF


def round_rows(x: jax.Array, code_dtype: Any, *, interpret: bool = False) -> RoundedRows:
    """As in quire.ops.weights.rounded_rows."""
    blocks = _Blocks(x.shape[1], BLOCK)
    codes, scales = _call(blocks, _round, x.shape, code_dtype, [], "round_rows", interpret)(x)
    return RoundedRows(x, codes, scales[:, None])


def add_norm(
    x: jax.Array,
    addend: Sums | None,
    weight: jax.Array,
    eps: float,
    offset: float,
    code_dtype: Any,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, RoundedRows]:
    """As `add_rms_norm` in quire.ops.weights.rounded_rows."""
    extra = [] if addend is None else [array(x.shape, x.dtype)]
    blocks, kernel = _Blocks(x.shape[1], BLOCK), partial(_add_norm, eps, offset)
    run = _call(blocks, kernel, x.shape, code_dtype, extra, "add_norm_round", interpret)
    *totals, codes, scales = run(x, weight, *_arrays(addend))
    total = totals[0] if totals else x
    normal = rms_norm(total, weight, eps, offset)  # compiled where it is read
    return total, RoundedRows(normal, codes, scales[:, None])


def gate(
    activation: Activation,
    both: Sums,
    code_dtype: Any,
    *,
    interpret: bool = False,
) -> RoundedRows:
    """As in quire.ops.weights.rounded_rows, of both [t, 1, 2, m]."""
    tokens, _, _, size = (both.sums if isinstance(both, ScaledSums) else both).shape
    flat = [operand.reshape(tokens, 2 * size) if operand.ndim == 4 else operand for operand in _arrays(both)]
    combine: Callable[..., jax.Array] = partial(_gated, activation, both.dtype)
    if activation is jax.nn.silu and both.dtype == jnp.bfloat16 and not interpret:
        combine = _gated_by_silu
    is_few = tokens <= FEW_ROWS and size >= BLOCK
    blocks = _Blocks(size, BLOCK, 16) if is_few else _Blocks(size, MANY_BLOCK, each=128)
    kernel = partial(_gate, combine, 2 if is_few else AHEAD)
    codes, scales = _call(blocks, kernel, (tokens, size), code_dtype, [], "gate_round", interpret)(*flat)
    return RoundedRows(gated_values(activation, both), codes, scales[:, None])


def _arrays(sums: Sums | None) -> list[jax.Array]:
    if sums is None:
        return []
    return [sums.sums, sums.rows[:, 0], sums.columns] if isinstance(sums, ScaledSums) else [sums]


Place = tuple[jax.Array, jax.Array | None]  # features, and which of them there are, where not all are


class _Blocks:
    """The features of a row, cut into blocks."""

    def __init__(self, size: int, width: int, num_warps: int | None = None, each: int = 256) -> None:
        """`each`: numbers of a block that a warp has."""
        self.size = size
        self.width = min(width if size <= MOST_BLOCKS * width else 2 * width, power_of_two(size))
        self.num_warps = num_warps or max(1, min(16, self.width // each))

    def places(self) -> list[Place]:
        places: list[Place] = []
        for start in range(0, self.size, self.width):
            feature = start + jnp.arange(self.width)
            places.append((feature, None if start + self.width <= self.size else feature < self.size))
        return places


def _call(
    blocks: _Blocks,
    kernel: Callable[..., None],
    shape: tuple[int, ...],
    code_dtype: Any,
    extra: Sequence[jax.ShapeDtypeStruct],
    name: str,
    interpret: bool,
) -> Callable[..., list[jax.Array]]:
    """Of operands: the `extra` arrays, codes of this shape, and the scale of each row."""
    out_shape = [*extra, array(shape, code_dtype), array(shape[:1], jnp.float32)]

    def run(*operands: jax.Array) -> list[jax.Array]:
        out: list[jax.Array] = pl.pallas_call(
            partial(kernel, blocks),
            grid=shape[:1],
            in_specs=[whole(operand) for operand in operands],
            out_specs=list(map(whole, out_shape)),
            out_shape=out_shape,
            compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
            interpret=interpret,
            name=name,
        )(*operands)
        return out

    return run


# All of a row is loaded before anything is stored: a load behind a store would wait for those before it.


def _round(blocks: _Blocks, x_ref: Any, codes_ref: Any, scales_ref: Any) -> None:
    row = pl.program_id(0)
    loaded = [_load(x_ref.at[row, feature], real) for feature, real in blocks.places()]
    _store(blocks, loaded, codes_ref, scales_ref)


def _add_norm(eps: float, offset: float, blocks: _Blocks, x_ref: Any, weight_ref: Any, *refs: Any) -> None:
    *addend_refs, codes_ref, scales_ref = refs
    row, places = pl.program_id(0), blocks.places()
    loaded = [_load(x_ref.at[row, feature], real) for feature, real in places]
    totals = list(map(_wide, loaded))
    weights = [_load(weight_ref.at[feature], real, STAYS) for feature, real in places]
    if addend_refs:
        *addend_refs, total_ref = addend_refs
        addends = _numbers(addend_refs, row, places)
        for index, (feature, real) in enumerate(places):
            total = (totals[index] + addends[index]()).astype(x_ref.dtype)  # it is what the next layer adds to
            plgpu.store(total_ref.at[row, feature], total, mask=real)
            totals[index] = _wide(total)
    squares = reduce(jnp.add, [total * total for total in totals]).sum()
    scale = jax.lax.rsqrt(squares / blocks.size + eps)
    normals = [
        (total * scale * (_wide(weight) + offset)).astype(x_ref.dtype)
        for total, weight in zip(totals, weights, strict=True)
    ]
    _store(blocks, normals, codes_ref, scales_ref)


def _gate(combine: Callable[..., jax.Array], ahead: int, blocks: _Blocks, *refs: Any) -> None:
    *both_refs, codes_ref, scales_ref = refs
    row, places = pl.program_id(0), blocks.places()
    coming: list[list[Callable[[], jax.Array]]] = []
    gated: list[jax.Array] = []
    for index in range(len(places)):
        next_places = places[len(coming) : index + ahead + 1]
        coming += [_numbers(both_refs, row, _with_ups(blocks, place)) for place in next_places]
        gate, up = coming[index]
        gated.append(combine(gate(), up()))
    _store(blocks, gated, codes_ref, scales_ref)


def _gated(activation: Activation, dtype: Any, gate: jax.Array, up: jax.Array) -> jax.Array:
    return (activation(gate) * up).astype(dtype)


# Two numbers of silu(gate) * up, rounded to bfloat16 together, and as float32 again. Triton takes twice as many
# instructions: it guards the quotient, whose denominator is between 1 and infinity here, and rounds one by one.
_GATED_BY_SILU = """{ .reg .f32 a, b; .reg .b32 both;
mul.f32 a, $2, 0fBFB8AA3B;
mul.f32 b, $3, 0fBFB8AA3B;
ex2.approx.ftz.f32 a, a;
ex2.approx.ftz.f32 b, b;
add.f32 a, a, 0f3F800000;
add.f32 b, b, 0f3F800000;
rcp.approx.ftz.f32 a, a;
rcp.approx.ftz.f32 b, b;
mul.f32 a, a, $2;
mul.f32 b, b, $3;
mul.f32 a, a, $4;
mul.f32 b, b, $5;
cvt.rn.bf16x2.f32 both, b, a;
shl.b32 $0, both, 16;
and.b32 $1, both, 0xFFFF0000; }"""


def _gated_by_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    given: Any = {"args": [gate, up], "pack": 2, "result_shape_dtypes": [array(gate.shape, jnp.float32)]}
    (values,) = plgpu.elementwise_inline_asm(_GATED_BY_SILU, constraints="=r,=r,f,f,f,f", **given)
    return values


def _with_ups(blocks: _Blocks, gates: Place) -> list[Place]:
    feature, real = gates
    return [gates, (blocks.size + feature, real)]


def _numbers(refs: Sequence[Any], row: Any, places: Sequence[Place]) -> list[Callable[[], jax.Array]]:
    """float32 numbers of a row, from numbers or from sums and scales: loaded now, and computed when called."""
    loaded = [_load(refs[0].at[row, feature], real) for feature, real in places]
    if len(refs) == 1:
        return [partial(_wide, numbers) for numbers in loaded]
    _, rows_ref, columns_ref = refs
    scale = rows_ref[row]
    columns = [_load(columns_ref.at[feature], real, STAYS) for feature, real in places]
    return [partial(_scaled, sums, scale, column) for sums, column in zip(loaded, columns, strict=True)]


def _scaled(sums: jax.Array, scale: jax.Array, columns: jax.Array) -> jax.Array:
    return _wide(sums) * scale * columns


def _wide(numbers: jax.Array) -> jax.Array:
    return numbers.astype(jnp.float32)


def _load(ref: Any, real: jax.Array | None, eviction: str = LEAVES) -> jax.Array:
    other = None if real is None else 0 if ref.dtype == jnp.int32 else 0.0
    loaded: jax.Array = plgpu.load(ref, mask=real, other=other, eviction_policy=eviction)
    return loaded


def _store(blocks: _Blocks, numbers: Sequence[jax.Array], codes_ref: Any, scales_ref: Any) -> None:
    """Codes and the scale of this program's row, whose numbers are of the model's type."""
    row = pl.program_id(0)
    scale = row_scale(reach_of(numbers), codes_ref.dtype)
    inverse = 1.0 / scale
    for block, (feature, real) in zip(numbers, blocks.places(), strict=True):
        plgpu.store(codes_ref.at[row, feature], nearest_codes(_wide(block) * inverse, codes_ref.dtype), mask=real)
    scales_ref[row] = scale


def reach_of(numbers: Sequence[jax.Array]) -> jax.Array:
    """The largest absolute value of a row, or NaN if the row has one. Triton's `max` of floats drops NaN; as integers,
    the bits of absolute values have the same order, and NaN is above infinity."""
    bits = [jax.lax.bitcast_convert_type(_wide(block), jnp.int32) & ALL_BUT_SIGN for block in numbers]
    return jax.lax.bitcast_convert_type(reduce(jnp.maximum, bits).max(), jnp.float32)
