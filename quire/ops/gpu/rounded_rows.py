"""Rows that are rounded to eight bits where they are made, each in one launch: XLA reads and writes them up to four
times.

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
from quire.ops.rounded_rows import (
    Activation,
    RoundedRows,
    ScaledSums,
    Sums,
    gated_values,
    nearest_codes,
    row_scale,
)

BLOCK = 2048  # numbers that a program handles together, eight for each thread
LONGEST = 16 * BLOCK  # a row of more has more threads, so that their registers suffice
# Of the first cache: scales of columns and factors of norms are read for every row, and rows once.
STAYS, LEAVES = "evict_last", "evict_first"


def round_rows(x: jax.Array, code_dtype: Any, *, interpret: bool = False) -> RoundedRows:
    """As in quire.ops.rounded_rows."""
    call = _call(partial(_round, _Blocks(x.shape[1])), x.shape, code_dtype, [], "round_rows", interpret)
    codes, scales = call(x)
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
    """As `add_rms_norm` in quire.ops.rounded_rows."""
    extra = [] if addend is None else [array(x.shape, x.dtype)]
    kernel = partial(_add_norm, _Blocks(x.shape[1]), eps, offset)
    *total, codes, scales = _call(kernel, x.shape, code_dtype, extra, "add_norm_round", interpret)(
        x, weight, *_arrays(addend)
    )
    summed = total[0] if total else x
    normal = rms_norm(summed, weight, eps, offset)  # compiled where it is read
    return summed, RoundedRows(normal, codes, scales[:, None])


def gate(activation: Activation, both: Sums, code_dtype: Any, *, interpret: bool = False) -> RoundedRows:
    """As in quire.ops.rounded_rows, of both [t, 1, 2, m]."""
    tokens, _, _, size = (both.sums if isinstance(both, ScaledSums) else both).shape
    flat = [one.reshape(tokens, 2 * size) if one.ndim == 4 else one for one in _arrays(both)]
    kernel = partial(_gate, _Blocks(size), activation, both.dtype)
    codes, scales = _call(kernel, (tokens, size), code_dtype, [], "gate_round", interpret)(*flat)
    return RoundedRows(gated_values(activation, both), codes, scales[:, None])


def _arrays(sums: Sums | None) -> list[jax.Array]:
    if sums is None:
        return []
    return [sums.sums, sums.rows[:, 0], sums.columns] if isinstance(sums, ScaledSums) else [sums]


class _Blocks:
    """The features of a row, cut into blocks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.width = min(BLOCK if size <= LONGEST else 2 * BLOCK, power_of_two(size))
        self.num_warps = max(1, min(16, self.width // 256))

    def places(self) -> list[tuple[jax.Array, jax.Array | None]]:
        """Features, and which of them there are, where not all are."""
        found: list[tuple[jax.Array, jax.Array | None]] = []
        for start in range(0, self.size, self.width):
            feature = start + jnp.arange(self.width)
            found.append((feature, None if start + self.width <= self.size else feature < self.size))
        return found


def _call(
    kernel: Callable[..., None],
    shape: tuple[int, ...],
    code_dtype: Any,
    extra: Sequence[jax.ShapeDtypeStruct],
    name: str,
    interpret: bool,
) -> Callable[..., list[jax.Array]]:
    """Of operands: the `extra` arrays, codes of this shape, and the scale of each row."""
    blocks: _Blocks = kernel.args[0]  # type: ignore[attr-defined]
    out_shape = [*extra, array(shape, code_dtype), array(shape[:1], jnp.float32)]

    def run(*operands: jax.Array) -> list[jax.Array]:
        out: list[jax.Array] = pl.pallas_call(
            kernel,
            grid=shape[:1],
            in_specs=[whole(operand) for operand in operands],
            out_specs=[whole(one) for one in out_shape],
            out_shape=out_shape,
            compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
            interpret=interpret,
            name=name,
        )(*operands)
        return out

    return run


def _round(blocks: _Blocks, x_ref: Any, codes_ref: Any, scales_ref: Any) -> None:
    row = pl.program_id(0)
    found = [_load(x_ref.at[row, feature], real) for feature, real in blocks.places()]
    _store(blocks, found, codes_ref, scales_ref)


def _add_norm(blocks: _Blocks, eps: float, offset: float, x_ref: Any, weight_ref: Any, *refs: Any) -> None:
    *addend_refs, codes_ref, scales_ref = refs
    row = pl.program_id(0)
    totals = [_load(x_ref.at[row, feature], real) for feature, real in blocks.places()]
    if addend_refs:
        *addend_refs, total_ref = addend_refs
        load = _loader(addend_refs, row)
        for index, (feature, real) in enumerate(blocks.places()):
            total = (totals[index] + load(feature, real)).astype(x_ref.dtype)  # it is what the next layer adds to
            plgpu.store(total_ref.at[row, feature], total, mask=real)
            totals[index] = total.astype(jnp.float32)
    squares = reduce(jnp.add, [total * total for total in totals]).sum()
    scale = jax.lax.rsqrt(squares / blocks.size + eps)
    normals = []
    for total, (feature, real) in zip(totals, blocks.places(), strict=True):
        factor = _load(weight_ref.at[feature], real, STAYS) + offset
        normals.append((total * scale * factor).astype(x_ref.dtype).astype(jnp.float32))
    _store(blocks, normals, codes_ref, scales_ref)


def _gate(blocks: _Blocks, activation: Activation, dtype: Any, *refs: Any) -> None:
    *both_refs, codes_ref, scales_ref = refs
    load = _loader(both_refs, pl.program_id(0))
    found = []
    for feature, real in blocks.places():
        active = activation(load(feature, real)) * load(blocks.size + feature, real)
        found.append(active.astype(dtype).astype(jnp.float32))
    _store(blocks, found, codes_ref, scales_ref)


def _loader(refs: Sequence[Any], row: Any) -> Callable[[jax.Array, jax.Array | None], jax.Array]:
    """Reads float32 numbers of a row, or sums with the scales of the row and of columns."""
    if len(refs) == 1:
        return lambda feature, real: _load(refs[0].at[row, feature], real)
    sums_ref, rows_ref, columns_ref = refs
    scale = rows_ref[row]

    def load(feature: jax.Array, real: jax.Array | None) -> jax.Array:
        numbers: jax.Array = _load(sums_ref.at[row, feature], real) * scale
        return numbers * _load(columns_ref.at[feature], real, STAYS)

    return load


def _load(ref: Any, real: jax.Array | None, eviction: str = LEAVES) -> jax.Array:
    other = None if real is None else 0 if ref.dtype == jnp.int32 else 0.0
    found: jax.Array = plgpu.load(ref, mask=real, other=other, eviction_policy=eviction).astype(jnp.float32)
    return found


def _store(blocks: _Blocks, numbers: Sequence[jax.Array], codes_ref: Any, scales_ref: Any) -> None:
    """Codes and the scale of this program's row."""
    row = pl.program_id(0)
    scale = row_scale(reduce(jnp.maximum, map(jnp.abs, numbers)).max(), codes_ref.dtype)
    inverse = 1.0 / scale
    for one, (feature, real) in zip(numbers, blocks.places(), strict=True):
        plgpu.store(codes_ref.at[row, feature], nearest_codes(one * inverse, codes_ref.dtype), mask=real)
    scales_ref[row] = scale
