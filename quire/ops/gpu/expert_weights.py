"""The matrices of experts as the kernel reads them: floats, codes of eight bits, or four-bit floats (mxfp4).

Codes are widened in registers, between memory and the product. A byte has the codes of two neighbouring inputs, so
activations are loaded in pairs too, and a block is two products: of the first of each pair, and of the second.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array
from quire.ops.weights.coded import Coded, float_scales, four_bit_floats
from quire.ops.weights.floats import PlainWeight
from quire.ops.weights.four_bit_experts import FourBitExperts

PAIR = 2  # codes of a byte
FOUR_BIT_GROUP = 32


# The numbers of the lower codes of four bytes, given with four exponents. Three bits of a code choose the two bytes of
# a bfloat16 from tables, its fourth is the sign; an exponent is a bfloat16 once it is shifted.
_WIDEN = """{
.reg .b32 codes, select, high, low, scale, zero;
mov.b32 zero, 0x80008000;
shr.u32 codes, $2, SHIFT;
and.b32 select, codes, 0x07070707;
shr.u32 high, select, 4;
or.b32 select, select, high;
prmt.b32 select, select, 0, 0x4420;
prmt.b32 high, 0x3f3f3f00, 0x40404040, select;
prmt.b32 low, 0xc0800000, 0xc0804000, select;
shl.b32 codes, codes, 4;
and.b32 codes, codes, 0x80808080;
or.b32 high, high, codes;
prmt.b32 scale, $3, 0, 0x4140;
shl.b32 scale, scale, 7;
prmt.b32 select, low, high, 0x5140;
fma.rn.bf16x2 $0, select, scale, zero;
prmt.b32 scale, $3, 0, 0x4342;
shl.b32 scale, scale, 7;
prmt.b32 select, low, high, 0x7362;
fma.rn.bf16x2 $1, select, scale, zero;
}"""


class WeightLayout(NamedTuple):
    """The layout of a weight in its arrays, the same for all experts."""

    dtype: Any  # of activations
    inputs: int
    group: int | None = None  # inputs that share a scale; None: floats, without scales
    is_paired: bool = False  # four bits, as a checkpoint has them
    is_stepped: bool = False  # four bits, as a GPU reads them
    is_interpreted: bool = False

    @property
    def steps(self) -> int:
        """Inputs of an element of the arrays along their last axis."""
        return PAIR if self.is_paired else 1

    @property
    def is_scaled_once(self) -> bool:
        return self.group is not None and self.group >= self.inputs

    @property
    def scales_blocks(self) -> bool:
        """True where the product of each block of inputs has a scale of its own."""
        return self.group is not None and not self.is_scaled_once and not (self.is_paired or self.is_stepped)

    def fits(self, block: int) -> bool:
        """True where the inputs of a block share a scale, or are multiplied by their own."""
        return not self.scales_blocks or self.group is None or self.group % block == 0


def layout_of(x: jax.Array, weight: Any, interpret: bool = False) -> WeightLayout | None:
    """None for weights that the kernel does not read."""
    inputs = weight.shape[-1]
    if isinstance(weight, FourBitExperts):
        layout = WeightLayout(x.dtype, inputs, FOUR_BIT_GROUP, is_stepped=True, is_interpreted=interpret)
        return layout if x.dtype.itemsize == 2 else None
    if not isinstance(weight, Coded):
        is_alike = isinstance(weight, PlainWeight) and weight.values.dtype == x.dtype
        return WeightLayout(x.dtype, inputs) if is_alike else None
    if weight.zeros is not None or weight.index is not None:
        return None
    if weight.bits == 8:
        layout = WeightLayout(x.dtype, inputs, inputs if weight.scales.shape[-1] == 1 else weight.group)
        return layout if layout.fits(FOUR_BIT_GROUP) and weight.scales.dtype != jnp.uint8 else None
    is_mxfp4 = weight.scales.dtype == jnp.uint8 and weight.group == FOUR_BIT_GROUP and inputs % FOUR_BIT_GROUP == 0
    layout = WeightLayout(x.dtype, inputs, weight.group, is_paired=True, is_interpreted=interpret)
    return layout if is_mxfp4 and x.dtype.itemsize == 2 else None


def arrays_of(layout: WeightLayout, x: jax.Array, weight: Any, parts: int) -> tuple[jax.Array, ...]:
    """x, the matrices [e, parts, outputs, inputs or their pairs], and their scales, if any, [e, parts, outputs, g];
    or the arrays of `FourBitExperts`."""
    if isinstance(weight, FourBitExperts):
        return x, weight.codes, weight.factors
    if isinstance(weight, PlainWeight):
        return x, weight.values.reshape(weight.shape[0], parts, -1, layout.inputs)
    if layout.is_paired:
        x = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, PAIR), jnp.int32)
    lead = weight.shape[0], parts, -1
    return (
        x,
        weight.codes.reshape(*lead, layout.inputs // layout.steps),
        weight.scales.reshape(*lead, weight.scales.shape[-1]),
    )


def load_rows(layout: WeightLayout, where: Any, mask: jax.Array) -> list[jax.Array]:
    """The blocks [rows, inputs] of activations, a block for each place of an element."""
    loaded = plgpu.load(where, mask=mask, other=0 if layout.is_paired else 0.0)
    if not layout.is_paired:
        return [loaded]
    halves = (loaded & 0xFFFF, jax.lax.shift_right_logical(loaded, 16))
    return [jax.lax.bitcast_convert_type(half.astype(jnp.int16), layout.dtype) for half in halves]


def load_weights(
    layout: WeightLayout, refs: Any, where: tuple[Any, ...], first: Any, size: int, mask: jax.Array | None
) -> list[jax.Array]:
    """The blocks [outputs, inputs] that those of `load_rows` meet, of `size` elements from `first` on.

    `where`: expert, part or parts [o], outputs [o].
    """
    expert, part, column = where[0], where[1], where[2][:, None]
    part = part[:, None] if isinstance(part, jax.Array) else part
    ref = refs[0].at[expert, part, column, (first + jnp.arange(size))[None, :]]
    is_integer = jnp.issubdtype(refs[0].dtype, jnp.integer)
    loaded = plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0 if is_integer else 0.0)
    if not layout.is_paired:
        return [loaded.astype(layout.dtype)]
    # An exponent is read once, and then there for all bytes of its group.
    each = FOUR_BIT_GROUP // PAIR
    outputs, groups = len(column), size // each
    group = jax.lax.div(first, each) + jnp.arange(groups)[None, :]
    there = jnp.broadcast_to((group < refs[1].shape[3]) & (column < refs[1].shape[2]), (outputs, groups))
    exponents = plgpu.load(refs[1].at[expert, part, column, group], mask=there, other=0)
    return _four_bits(
        layout, loaded, jnp.broadcast_to(exponents[:, :, None], (outputs, groups, each)).reshape(loaded.shape)
    )


def _four_bits(layout: WeightLayout, codes: jax.Array, exponents: jax.Array) -> list[jax.Array]:
    """The numbers of the lower and of the higher halves of bytes."""
    if layout.is_interpreted or layout.dtype != jnp.bfloat16:
        factor, wide = float_scales(exponents), codes.astype(jnp.int32)
        return [(four_bit_floats(code) * factor).astype(layout.dtype) for code in (wide & 15, wide >> 4)]
    like = [array(codes.shape, layout.dtype)]
    given: Any = {"args": [codes, exponents], "constraints": "=&r,=&r,r,r", "pack": 4, "result_shape_dtypes": like}
    texts = (_WIDEN.replace("SHIFT", shift) for shift in ("0", "4"))
    return [plgpu.elementwise_inline_asm(text, **given)[0] for text in texts]


def load_scales(
    layout: WeightLayout, refs: Any, where: tuple[Any, ...], first: Any, mask: Any | None
) -> jax.Array | None:
    """The scales [outputs] of a product from input `first` on, where it is multiplied by them as a whole."""
    if layout.group is None or layout.is_paired:
        return None
    expert, part, column = where
    ref = refs[1].at[expert, part, column, 0 if layout.is_scaled_once else jax.lax.div(first, layout.group)]
    return (plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0.0)).astype(jnp.float32)


class Side(NamedTuple):
    """The outputs of a block: those of one part, or of gates and ups together."""

    part: Any  # a number, or one for each output: int32 [o]
    column: jax.Array  # int32 [o]: of its part
    is_output: jax.Array | None  # bool [o]; None: all are
    row: jax.Array  # int32 [o]: of all parts after each other

    @property
    def num_outputs(self) -> int:
        return len(self.column)


def sides_of(first: Any, columns: int, outputs: int, parts: int, *, joins: bool) -> list[Side]:
    """The columns from `first` on of each part, apart or as one block, the parts after each other."""
    if joins:
        number = jnp.arange(parts * columns)
        return [_side(jax.lax.div(number, columns), first + jax.lax.rem(number, columns), columns, outputs)]
    return [_side(part, first + jnp.arange(columns), columns, outputs) for part in range(parts)]


def _side(part: Any, column: jax.Array, columns: int, outputs: int) -> Side:
    return Side(part, column, None if outputs % columns == 0 else column < outputs, part * outputs + column)


def apart(sums: list[jax.Array], parts: int) -> list[jax.Array]:
    """The sums [outputs, rows] of each part; of a joined block they are taken from it."""
    if len(sums) == parts:
        return sums
    (joined,) = sums
    both = joined.reshape(parts, -1, joined.shape[1])
    number = jnp.arange(parts)[:, None, None]
    return [jnp.where(number == part, both, 0.0).sum(axis=0) for part in range(parts)]
