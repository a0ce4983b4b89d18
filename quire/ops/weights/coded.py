"""Matrices as quantised checkpoints hold them, multiplied from their codes.

A number of the weight is (code - zero point) * scale. It exists in float inside a product, for the time that one
product takes, and nowhere else. Where a checkpoint quantises activations as well, the rows are rounded as it says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.native import coded_product, library
from quire.ops.weights.activation_rounding import Rounding
from quire.ops.weights.rounded_rows import BlockRows, CodeProduct, RoundedRows, Rows, ScaledSums
from quire.ops.weights.weight import Axes, Weight, flat_rows, ragged_product

# (rows [n, inputs], matrices [e, outputs, inputs], sizes [e]) -> float32 [n, outputs]
GroupedProduct = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

MIDDLE = 8  # the zero point of four bits that have no other
LARGEST_INT8 = 127.0
# Rows up to which a GPU widens codes inside the product, where it has no kernel: reading them takes all the time there,
# and rounding rows would add to it. Programs of so few rows are compiled with XLA's own products, which alone do that.
FEW_ROWS = 32
WIDENED_AT_ONCE = 1 << 24  # numbers of experts; their float copies are a step's largest temporary otherwise


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scales", "zeros", "index", "input_scale", "input_zero", "num_rows", "output_scales"],
    meta_fields=["shape", "num_contracted", "is_of_experts", "bits", "group", "rounding", "is_native", "is_direct"],
)
@dataclass(frozen=True)
class Coded(Weight):
    """A weight in the codes of a checkpoint, or in those that its devices made of its floats.

    Scales have the weight's axes of outputs, and one for the groups of inputs. Scales that are uint8 are exponents of
    two. Codes of four bits beside scales of a byte are floats (mxfp4, nvfp4).
    """

    codes: Any  # int8 or e4m3 of the weight's shape; of four bits uint8, two along the last axis, the lower first
    scales: Any  # [*outputs, groups]: floats, e4m3 among them, or uint8 for e8m0
    zeros: Any | None  # int8 or int16 [*outputs, groups]; None: 0, or `MIDDLE` of four bits
    index: Any | None  # int32 [inputs], or [experts, inputs]: the group of each; None: one after the other
    input_scale: Any | None  # float32 [], or [experts]; None: rows have scales of their own, or are not rounded
    input_zero: Any | None
    shape: tuple[int, ...]
    num_contracted: int  # of the last axes
    is_of_experts: bool
    bits: int
    group: int  # inputs with the same scale
    rounding: Rounding | None = None
    is_native: bool = False  # on one CPU with the native library, which multiplies one row like the next
    is_direct: bool = False  # on GPUs, which multiply codes of eight bits by each other
    num_rows: Any = None  # int32 []: rows that a native product computes, the first; None: all
    output_scales: Any = None  # float32 [*outputs], times which sums are the products; None: 1

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> "Coded":
        at = len(self.shape) - self.num_contracted
        of_groups = (*axes[:at], axes[at])

        def whole(array: Any) -> Any:
            return None if array is None else change(array, (None,) * len(array.shape))

        return replace(
            self,
            codes=change(self.codes, axes),
            scales=change(self.scales, of_groups),
            zeros=None if self.zeros is None else change(self.zeros, of_groups),
            index=whole(self.index),
            input_scale=whole(self.input_scale),
            input_zero=whole(self.input_zero),
            output_scales=None if self.output_scales is None else change(self.output_scales, axes[:at]),
        )

    def native(self) -> "Coded":
        return replace(self, is_native=True)

    def direct(self, forms: Sequence[Callable[["Coded"], Weight | None]] = ()) -> Weight:
        made = (form(self) for form in forms)
        return next((weight for weight in made if weight is not None), replace(self, is_direct=True))

    def for_rows(self, num_rows: jax.Array) -> "Coded":
        return replace(self, num_rows=num_rows) if self.is_native else self

    @property
    def widened_bytes(self) -> int:
        if self._multiplies_codes and not self.is_of_experts:
            return 0
        return experts_widened_bytes(self.shape) if self.is_of_experts else 4 * prod(self.shape)

    @property
    def has_codes(self) -> bool:
        return True

    @property
    def gains_from_timings(self) -> bool:
        """The library's own choice is as good for e4m3; for int8 it takes up to a third longer."""
        return bool(self.codes.dtype != jnp.float8_e4m3fn)

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        if self._multiplies_codes and len(x) > FEW_ROWS:
            return self.sums(x, dtype).numbers()
        x = flat_rows(x)
        if self._multiplies_codes:  # the numbers are used as they are, and the codes widened inside the product
            assert self.rounding is not None
            codes = self.codes.reshape(-1, x.shape[1]).astype(x.dtype)
            out = jnp.einsum("ti,oi->to", self.rounding.unrounded(x), codes, preferred_element_type=jnp.float32)
            return jnp.asarray(out * self._column_scales)
        inputs = prod(self.shape[-self.num_contracted :])
        groups = self.scales.shape[-1]
        codes, scales = self.codes.reshape(-1, inputs * self.bits // 8), self.scales.reshape(-1, groups)
        zeros = None if self.zeros is None else self.zeros.reshape(-1, groups)
        row_scale = None
        if self.rounding is not None:
            x_codes, row_scale = self.rounding(x, self.input_scale, self.input_zero)
            if groups > 1 or row_scale.shape[1] > 1:
                x, row_scale = (x_codes * _spread(row_scale, self.rounding.group, inputs)).astype(x.dtype), None
            else:
                x = x_codes.astype(x.dtype)  # exact, as every float has the bits of a code
        if self._is_native_for(x):
            sizes = None if self.num_rows is None else self.num_rows.reshape(1)
            out = coded_product.product(
                x, codes, scales, zeros, self.index, group=self.group, scaled=groups > 1, sizes=sizes
            )
        else:
            numbers = self._numbers(codes, zeros, self.index)
            if groups > 1:
                numbers = numbers * self._by_input(float_scales(scales), self.index, inputs)
            out = jnp.einsum("ti,oi->to", x, numbers.astype(x.dtype), preferred_element_type=jnp.float32)
        if groups == 1:
            out = out * float_scales(scales[:, 0])
        if self.output_scales is not None:
            out = out * self.output_scales.reshape(-1)
        return out if row_scale is None else out * row_scale

    @property
    def _multiplies_codes(self) -> bool:
        """True where a product of codes, times scales of rows and of outputs, is all there is to do."""
        is_plain = self.bits == 8 and self.scales.shape[-1] == 1 and self.zeros is None and self.index is None
        if not (self.is_direct and is_plain) or self.rounding is None or self.input_zero is not None:
            return False
        rounding, is_float = self.rounding, self.codes.dtype == jnp.float8_e4m3fn
        return rounding.symmetric and rounding.group is None and rounding.is_float == is_float

    @property
    def _column_scales(self) -> jax.Array:
        return jnp.asarray(self.scales.reshape(-1).astype(jnp.float32))

    def row_code_dtype(self, num_rows: int, kernel: CodeProduct | None) -> Any | None:
        if not self._multiplies_codes or self.is_of_experts or self.input_scale is not None:
            return None
        if self.rounding is not None and self.rounding.reach is not None:  # scales of rows are not those of others
            return None
        has_kernel = kernel is not None and kernel.fits(num_rows, self.codes, self.num_contracted)
        return self.codes.dtype if num_rows > FEW_ROWS or has_kernel else None

    def takes_rows_as_they_are(self, num_rows: int, kernel: CodeProduct | None) -> bool:
        """True on a GPU if so many rows are multiplied with codes of eight bits as they are, and the sums with a scale
        of each output: nothing else is to be done."""
        if not self.is_direct or (self.rounding is not None and not self._multiplies_codes):
            return False
        is_bound = self.rounding is not None and self.rounding.reach is not None
        return not is_bound and num_rows <= FEW_ROWS and self.row_code_dtype(num_rows, kernel) is None

    def code_sums(self, x: Rows, dtype: Any, kernel: CodeProduct | None) -> ScaledSums:
        return self.sums(x, dtype, kernel)

    def sums(self, x: Rows, dtype: Any, kernel: CodeProduct | None = None) -> ScaledSums:
        """[t, outputs] of rows x [t, *inputs], whose numbers the caller rounds to `dtype`."""
        assert self.rounding is not None
        scales = None
        if isinstance(x, BlockRows):
            assert kernel is not None
            rows, row_scales, scales = x.codes, jnp.ones((len(x), 1), jnp.float32), x.scales
        elif isinstance(x, RoundedRows) and x.codes.dtype == self.row_code_dtype(len(x), kernel):
            rows, row_scales = x.codes, x.scales
        else:
            rows, row_scales = self.rounding.codes(flat_rows(x), self.input_scale)
        # Sums in bfloat16 are half the bytes to write and read; float16 has no room for them.
        sums = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
        sums = sums if self.rounding.is_float else jnp.int32
        codes = self.codes.reshape(-1, rows.shape[1])
        if kernel is not None and (scales is not None or kernel.fits(len(rows), codes, 1)):
            out = kernel.multiply(rows, codes, sums, scales)
        else:
            out = jnp.einsum("ti,oi->to", rows, codes, preferred_element_type=sums)
        return ScaledSums(out, row_scales, self._column_scales, jnp.dtype(dtype))

    def grouped_product(
        self,
        x: jax.Array,
        sizes: jax.Array,
        multiply: GroupedProduct = ragged_product,
        at_once: int = WIDENED_AT_ONCE,
    ) -> jax.Array:
        """Experts that no row visits are left out. `multiply` gets float copies of as many experts as have `at_once`
        numbers; the native library does without it."""
        num_experts, inputs = self.shape[0], self.shape[-1]
        outputs, groups = prod(self.shape[1:-1]), self.scales.shape[-1]
        owner = jnp.repeat(jnp.arange(num_experts), sizes, total_repeat_length=len(x))
        x = self.rounded_rows(x, owner)

        def matrices(*lead: int) -> list[Any]:
            """Codes, scales, zero points and orders of inputs, the experts along these axes."""
            shapes = ((self.codes, outputs, self.codes.shape[-1]), (self.scales, outputs, groups))
            optional = ((self.zeros, outputs, groups), (self.index, inputs))
            return [None if a is None else a.reshape(*lead, *shape) for a, *shape in (*shapes, *optional)]

        if self._is_native_for(x):
            return self._scaled(coded_product.product(x, *matrices(num_experts), group=self.group, sizes=sizes), owner)
        together = _divisor(num_experts, max(1, at_once // (outputs * inputs)))
        chunks = num_experts // together, together
        starts = jnp.cumsum(sizes) - sizes

        def add(out: jax.Array, part: Any) -> tuple[jax.Array, None]:
            arrays, own_sizes, own_starts = part
            first = own_starts[0]

            def visited(out: jax.Array) -> jax.Array:
                wide = jax.vmap(self._widened)(*arrays).astype(x.dtype)
                found = multiply(jnp.roll(x, -first, axis=0), wide, own_sizes)
                is_own = jnp.arange(len(x)) < jnp.sum(own_sizes)
                return out + jnp.roll(jnp.where(is_own[:, None], found, 0.0), first, axis=0)

            return jax.lax.cond(jnp.sum(own_sizes) > 0, visited, lambda out: out, out), None

        parts = matrices(*chunks), sizes.reshape(chunks), starts.reshape(chunks)
        return self._scaled(jax.lax.scan(add, jnp.zeros((len(x), outputs), jnp.float32), parts)[0], owner)

    def _scaled(self, sums: jax.Array, owner: jax.Array) -> jax.Array:
        """The products of the sums [n, outputs] of the experts [n] that own the rows."""
        if self.output_scales is None:
            return sums
        return jnp.asarray(sums * self.output_scales.reshape(self.shape[0], -1)[owner])

    def rounded_visits(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """Those of few tokens stay what they are where that is allowed: the products of dense layers do the same."""
        if self.rounding is None:
            return x
        if self.is_direct and self.bits == 8 and self.input_scale is None and len(x) <= FEW_ROWS:
            return self.rounding.unrounded(x)
        if self.input_scale is not None:  # of each expert its own
            x = jnp.broadcast_to(x, (*expert.shape, x.shape[-1]))
        return self.rounded_rows(x.reshape(-1, x.shape[-1]), expert.reshape(-1)).reshape(x.shape)

    def without_rounding(self) -> "Coded":
        return replace(self, rounding=None, input_scale=None, input_zero=None)

    def part_of_device(self) -> "Coded":
        shape = self.codes.shape
        return replace(self, shape=(*shape[:-1], shape[-1] * 8 // self.bits))

    def rounded_rows(self, x: jax.Array, owner: jax.Array) -> jax.Array:
        """Rows [n, inputs] as the checkpoint rounds them for the experts [n] that own them."""
        if self.rounding is None:
            return x
        scale, zero = (None if a is None else a[owner] for a in (self.input_scale, self.input_zero))
        codes, row_scale = self.rounding(x, scale, zero)
        return (codes * _spread(row_scale, self.rounding.group, x.shape[1])).astype(x.dtype)

    def rows(self, indices: jax.Array) -> jax.Array:
        zeros = None if self.zeros is None else self.zeros[indices]
        found = self._widened(self.codes[indices], self.scales[indices], zeros, self.index)
        return found if self.output_scales is None else found * self.output_scales[indices][:, None]

    def _is_native_for(self, x: jax.Array) -> bool:
        """The kernel reads whole bytes of a group."""
        is_possible = self.is_native and x.dtype == jnp.float32 and self.group * self.bits % 8 == 0
        return is_possible and library.need("codes")

    def _widened(self, codes: jax.Array, scales: jax.Array, zeros: Any, index: Any) -> jax.Array:
        """float32 [outputs, inputs] of the arrays of one matrix."""
        numbers = self._numbers(codes, zeros, index)
        return numbers * self._by_input(float_scales(scales), index, numbers.shape[1])

    def _numbers(self, codes: jax.Array, zeros: jax.Array | None, index: jax.Array | None) -> jax.Array:
        """Codes less their zero points in float32, one by one."""
        if self.bits == 4:
            pairs = jnp.stack((codes & 15, codes >> 4), axis=-1)
            codes = pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
            if self.scales.dtype.itemsize == 1:
                return four_bit_floats(codes)
        numbers = codes.astype(jnp.float32)
        if zeros is None:
            return numbers - MIDDLE if self.bits == 4 else numbers
        return numbers - self._by_input(zeros.astype(jnp.float32), index, numbers.shape[1])

    def _by_input(self, values: jax.Array, index: jax.Array | None, inputs: int) -> jax.Array:
        """[outputs, inputs] of [outputs, groups]."""
        return _spread(values, self.group, inputs) if index is None else values[:, index]


def experts_widened_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of the float32 copies that a product of experts' matrices of this shape has at once, at most."""
    numbers = prod(shape)
    return 4 * min(numbers, max(WIDENED_AT_ONCE, numbers // shape[0]))


def float_scales(scales: jax.Array) -> jax.Array:
    """float32 of scales that are floats, or exponents of two plus 127 in a byte, of which 255 does not occur."""
    if scales.dtype != jnp.uint8:
        return scales.astype(jnp.float32)
    bits = jnp.where(scales == 0, 1 << 22, scales.astype(jnp.int32) << 23)  # the least is below the normal numbers
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def four_bit_floats(codes: jax.Array) -> jax.Array:
    """float32 of codes with a sign, two bits of exponent and one of fraction: 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""
    size = (codes & 7).astype(jnp.int32)
    normal = jax.lax.bitcast_convert_type((size << 22) + (126 << 23), jnp.float32)
    found = jnp.where(size < 2, size * jnp.float32(0.5), normal)
    return jnp.where(codes & 8 > 0, -found, found)


def _spread(values: jax.Array, group: int | None, size: int) -> jax.Array:
    """[n, size] of [n, groups]: each value `group` times."""
    if values.shape[1] == 1 or group is None:
        return values
    return jnp.repeat(values, group, axis=1)[:, :size]


def _divisor(number: int, most: int) -> int:
    """The largest divisor that is at most `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)
