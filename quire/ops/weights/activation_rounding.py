"""The quantisation of activations that checkpoints ask for."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.weights.rounded_rows import EPSILON, HALF_OF_INT8, LARGEST_FLOAT8, nearest_codes, round_rows, row_reach

LEAST_BOUNDED = 1.0 / (LARGEST_FLOAT8 * 512.0)  # scale of rows that have a largest one (fbgemm)
LARGEST_FLOAT4 = 6.0
LEAST_LOCAL = 0.125  # e4m3 in the place of 0, whose numbers become 0 in any case
# By size: the least that becomes a number, whether that itself does, and the number.
_FOUR_BITS = (
    (0.25, False, 0.5), (0.75, True, 1.0), (1.25, False, 1.5), (1.75, True, 2.0), (2.5, False, 3.0), (3.5, True, 4.0),
    (5.0, False, LARGEST_FLOAT4),
)  # fmt: skip


@dataclass(frozen=True)
class Rounding:
    """The quantisation of activations that a checkpoint asks for. The scale is `input_scale`, or one of each row.

    Floats of four bits have a scale of each group: e4m3 over an `input_scale`, by which it was multiplied, or a power
    of two.
    """

    is_float: bool  # e4m3 or e2m1, or else int8
    group: int | None = None  # inputs that share a scale; None: all of a row
    symmetric: bool = True
    bits: int = 8
    reach: float | None = None  # of one scale of each row, at most; numbers beyond it become the largest code

    def __call__(self, x: jax.Array, scale: jax.Array | None, zero: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The codes of rows [t, inputs] less their zero points, in float32, and their scales [t or 1, groups]."""
        rows = x.astype(jnp.float32)
        size = rows.shape[1]
        group = size if self.group is None else self.group
        groups = -(-size // group)
        rows = jnp.pad(rows, ((0, 0), (0, groups * group - size))).reshape(len(x), groups, group)
        if self.bits == 4:
            scale = _four_bit_scale(rows, None if scale is None else scale.reshape(-1, 1, 1))
        elif scale is None:
            scale, zero = self._measured(rows)
        else:
            scale, zero = scale.reshape(-1, 1, 1), None if zero is None else zero.reshape(-1, 1, 1)
        codes = _divided(rows, scale) + (0.0 if zero is None else zero)
        if self.bits == 4:
            codes = nearest_four_bit_floats(codes)
        elif self.is_float:
            codes = jnp.clip(codes, -LARGEST_FLOAT8, LARGEST_FLOAT8).astype(jnp.float8_e4m3fn).astype(jnp.float32)
        else:
            codes = jnp.clip(jnp.round(codes), -128.0, 127.0) - (0.0 if zero is None else zero)
        return codes.reshape(len(x), -1)[:, :size], scale[..., 0]

    def codes(self, x: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The codes of rows [t, inputs] as they are multiplied, e4m3 or int8, and their scales [t, 1]: symmetric, and
        one for a row."""
        rows = x.astype(jnp.float32)
        if scale is None:
            if self.reach is None:
                rounded = round_rows(x, self.code_dtype)
                return rounded.codes, rounded.scales
            scale = _bounded_scale(row_reach(rows), self.reach)
        scales = jnp.broadcast_to(scale, (len(x), 1))
        if not self.is_float:
            scales += jnp.sum(rows - rows, axis=1, keepdims=True)  # 0, or NaN, which int8 cannot be
        return nearest_codes(rows * (1.0 / scale), self.code_dtype), scales

    @property
    def code_dtype(self) -> Any:
        return jnp.dtype(jnp.float8_e4m3fn if self.is_float else jnp.int8)

    def _measured(self, rows: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Scales and zero points of groups [t, groups, group] that reach from their least number to their largest."""
        if self.symmetric:
            reach = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
            if self.reach is not None:
                return _bounded_scale(reach, self.reach), None
            scale = _divided(reach, LARGEST_FLOAT8 if self.is_float else HALF_OF_INT8)
        else:
            least = jnp.minimum(jnp.min(rows, axis=-1, keepdims=True), 0.0)
            scale = _divided(jnp.maximum(jnp.max(rows, axis=-1, keepdims=True), 0.0) - least, 255.0)
        scale = jnp.where(scale == 0.0, EPSILON, scale)
        return scale, None if self.symmetric else jnp.round(jnp.clip(-128.0 - least / scale, -128.0, 127.0))

    def unrounded(self, x: jax.Array) -> jax.Array:
        """Rows that are multiplied without being rounded, where that is allowed."""
        return x if self.reach is None else jnp.clip(x, -self.reach, self.reach)


def _bounded_scale(reach: jax.Array, most: float) -> jax.Array:
    """The scales of rows whose largest numbers are `reach`, of which `most` counts; NaN stays."""
    scale = _divided(jnp.where(reach > most, most, reach), LARGEST_FLOAT8)
    return jnp.where(scale < LEAST_BOUNDED, LEAST_BOUNDED, scale)


def nearest_four_bit_floats(numbers: jax.Array) -> jax.Array:
    """e2m1 in float32; a number between two becomes the one with an even code, and NaN stays."""
    size, found = jnp.abs(numbers), jnp.zeros_like(numbers)
    for least, is_in, number in _FOUR_BITS:
        found = jnp.where(size >= least if is_in else size > least, number, found)
    return jnp.where(jnp.isnan(numbers), numbers, jnp.where(numbers < 0, -found, found))


def _four_bit_scale(rows: jax.Array, over: jax.Array | None) -> jax.Array:
    """The scales [t, groups, 1] of groups: e4m3 over a scale of all of them, or powers of two."""
    reach = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    if over is None:
        bits = jax.lax.bitcast_convert_type(reach, jnp.int32) + (1 << 21)  # up where the largest would be above 7
        exponent = jnp.maximum((bits >> 23) - 2, 1)  # e2m1 reaches 2^2
        return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    wanted = jnp.clip(_divided(reach, LARGEST_FLOAT4) * over, 0.0, LARGEST_FLOAT8)
    local = wanted.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    return _divided(jnp.where(local == 0.0, LEAST_LOCAL, local), over)


def _divided(numbers: jax.Array, divisor: jax.Array | float) -> jax.Array:
    """Exact quotients. The compiler would multiply by the inverse of a divisor that several numbers share, which gives
    another last bit, and the largest activation of a row lies exactly between two codes of int8."""
    each = jnp.broadcast_to(jnp.asarray(divisor, jnp.float32), numbers.shape)
    exact: jax.Array = numbers / jax.lax.optimization_barrier(each)  # type: ignore[no-untyped-call]
    return exact
