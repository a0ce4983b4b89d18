"""Four-bit floats of experts in `expert_product`, in the layout of `FourBitExperts`: widened two at a time by one or
two instructions, in the registers from which the device multiplies."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.expert_weights import Side
from quire.ops.gpu.tiles import array, product
from quire.ops.weights.coded import float_scales, four_bit_floats
from quire.ops.weights.four_bit_experts import GROUP, PLACES, STEP, code_at
from quire.ops.weights.four_bits import TILE

# Two codes of a place as bfloat16, times a power of two. The bits of a code are a bfloat16 that is 2 ** 126 too small,
# subnormal codes included. The power is 2 ** `_LESS` too small, so that it is a bfloat16 for every real exponent.
_WIDEN = """{
.reg .b32 codes, other;
PLACE
mov.b32 other, 0x80008000;
fma.rn.bf16x2 $0, codes, $2, other;
}"""
_SHIFTED = "shl.b32 codes, $1, SHIFT;\nand.b32 codes, codes, 0x81c081c0;"
_PLACES = (
    _SHIFTED.replace("SHIFT", "0"),
    _SHIFTED.replace("SHIFT", "3"),
    _SHIFTED.replace("SHIFT", "6"),
    "shl.b32 codes, $1, 1;\n"
    "and.b32 codes, codes, 0x80008000;\n"
    "shr.u32 other, $1, 3;\n"
    "lop3.b32 codes, other, 0x01800180, codes, 0xea;\n"
    "shr.u32 other, $1, 7;\n"
    "lop3.b32 codes, other, 0x00400040, codes, 0xea;",
)
_LESS = 32
_BIAS = 126 - _LESS  # of exponents, which count from 127 too


def add_step(
    step: Any, sums: list[jax.Array], where: tuple[Any, ...], sides: list[Side], refs: Any, exact: bool
) -> list[jax.Array]:
    """The sums [outputs, rows] of each side plus those of a step; `result` finishes them.

    `where`: the expert, and the tokens, choices and presence of rows. `exact`: by plain operations.
    """
    expert, token, choice, is_there = where
    x_ref, codes_ref, factors_ref = refs
    inputs = x_ref.shape[2]

    def load(ref: Any, is_output: jax.Array | None, *sizes: int) -> jax.Array:
        if is_output is None:
            return plgpu.load(ref)
        mask = jnp.broadcast_to(is_output.reshape(-1, *[1] * len(sizes)), (len(is_output), *sizes))
        return plgpu.load(ref, mask=mask, other=0)

    elements, factors = [], []
    for side in sides:
        tile, of_tile = jax.lax.div(side.row, TILE)[:, None], jax.lax.rem(side.row, TILE)[:, None]
        where_is = codes_ref.at[expert, tile, step, of_tile, jnp.arange(GROUP)[None, :]]
        elements.append(load(where_is, side.is_output, GROUP))
        factors.append(load(factors_ref.at[expert, step, side.row], side.is_output))
    for place in range(PLACES):
        at = step * STEP + place * GROUP + jnp.arange(GROUP)
        mask = is_there[:, None] if inputs % STEP == 0 else is_there[:, None] & (at < inputs)[None, :]
        mask = jnp.broadcast_to(mask, (len(token), GROUP))
        some = plgpu.load(x_ref.at[token[:, None], choice[:, None], at[None, :]], mask=mask, other=0.0)
        for at_side, its_factors in enumerate(factors):
            exponents = (its_factors >> 8 * place) & 255
            numbers = _widened(elements[at_side], exponents, place, some.dtype, exact)
            sums[at_side] = sums[at_side] + product(numbers, some, 1)
    return sums


def result(sums: list[jax.Array], dtype: Any, exact: bool) -> list[jax.Array]:
    return sums if exact or dtype != jnp.bfloat16 else [total * 2.0**_LESS for total in sums]


def _widened(elements: jax.Array, exponents: jax.Array, place: int, dtype: Any, exact: bool) -> jax.Array:
    if exact or dtype != jnp.bfloat16:
        factor = float_scales(exponents.astype(jnp.uint8))[:, None]
        return (four_bit_floats(code_at(elements.astype(jnp.int32), place)) * factor).astype(dtype)
    bits = jnp.minimum(exponents + _BIAS, 254) << 7
    powers = jax.lax.bitcast_convert_type(bits.astype(jnp.int16), dtype)
    given: Any = {"args": [elements, jnp.broadcast_to(powers[:, None], elements.shape)], "pack": 2}
    like = [array(elements.shape, dtype)]
    text = _WIDEN.replace("PLACE", _PLACES[place])
    (numbers,) = plgpu.elementwise_inline_asm(text, constraints="=r,r,r", result_shape_dtypes=like, **given)
    return numbers
