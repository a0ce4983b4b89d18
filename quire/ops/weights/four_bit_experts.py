"""Experts' matrices of four-bit floats (mxfp4) as one GPU reads them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.weights.coded import Coded, experts_widened_bytes
from quire.ops.weights.four_bits import TILE
from quire.ops.weights.rounded_rows import Rows
from quire.ops.weights.weight import Axes, Weight

PLACES = 4  # codes of an element
GROUP = 32  # inputs that share an exponent, and elements of a step
STEP = PLACES * GROUP  # inputs of a step
# The bits of an element that each place's code has, from its lowest bit to its sign. Once they are shifted, those of
# the first three places lie as in a bfloat16: the sign first, and three bits across its exponent and its fraction.
BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "factors"], meta_fields=["shape"])
@dataclass(frozen=True)
class FourBitExperts(Weight):
    """Matrices [experts, *outputs, inputs] of `Coded`, in another order.

    The inputs are cut into steps of four groups, the last one filled up with zeros. An element of a step has a code of
    each group, and a factor their exponents, the first in its lowest byte.
    """

    codes: Any  # int16 [experts, outputs / TILE, steps, TILE, GROUP]; outputs that are missing are zeros
    factors: Any  # int32 [experts, steps, outputs]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, weight: Coded) -> "FourBitExperts | None":
        """None for one that has no such order."""
        inputs = weight.shape[-1]
        is_whole = weight.group == GROUP and inputs % GROUP == 0 and weight.num_contracted == 1
        is_plain = weight.zeros is None and weight.index is None and weight.rounding is None
        if not (
            weight.is_of_experts and weight.bits == 4 and weight.scales.dtype == jnp.uint8 and is_whole and is_plain
        ):
            return None
        is_like = isinstance(weight.codes, jax.ShapeDtypeStruct)
        given = weight.codes, weight.scales
        codes, factors = jax.eval_shape(_turned, *given) if is_like else _turned(*given)
        return cls(codes, factors, weight.shape)

    @property
    def num_contracted(self) -> int:
        return 1

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        raise NotImplementedError("experts have a grouped product")

    def grouped_product(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return self.coded().grouped_product(x, sizes)

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> "FourBitExperts":
        """Its arrays are on one device."""
        codes, factors = ((None,) * len(array.shape) for array in (self.codes, self.factors))
        return replace(self, codes=change(self.codes, codes), factors=change(self.factors, factors))

    @property
    def widened_bytes(self) -> int:
        """Without the kernel, that is."""
        return experts_widened_bytes(self.shape)

    @property
    def has_codes(self) -> bool:
        return True

    @property
    def gains_from_timings(self) -> bool:
        return True

    def coded(self) -> Coded:
        """The same matrices in the usual order."""
        experts, _, num_steps, _, _ = self.codes.shape
        outputs, inputs = self.factors.shape[2], self.shape[-1]
        steps = self.codes.astype(jnp.int32).transpose(0, 1, 3, 2, 4).reshape(experts, -1, num_steps, GROUP)
        steps = steps[:, :outputs]
        codes = jnp.stack([code_at(steps, place) for place in range(PLACES)], axis=3)
        codes = codes.reshape(experts, outputs, -1, 2)[:, :, : inputs // 2].astype(jnp.uint8)
        exponents = self.factors.transpose(0, 2, 1)[..., None] >> (8 * jnp.arange(PLACES))
        exponents = (exponents & 255).astype(jnp.uint8).reshape(experts, outputs, -1)[:, :, : inputs // GROUP]
        return Coded(
            codes=(codes[..., 0] | codes[..., 1] << 4).reshape(*self.shape[:-1], -1),
            scales=exponents.reshape(*self.shape[:-1], -1),
            zeros=None, index=None, input_scale=None, input_zero=None, shape=self.shape, num_contracted=1,
            is_of_experts=True, bits=4, group=GROUP, is_direct=True,
        )  # fmt: skip


def code_at(elements: jax.Array, place: int) -> jax.Array:
    """The codes that int32 elements have at a place."""
    found = jnp.zeros_like(elements)
    for bit, at in enumerate(BITS[place]):
        found = found | (((elements >> at) & 1) << bit)
    return found


@jax.jit
def _turned(codes: jax.Array, exponents: jax.Array) -> tuple[jax.Array, jax.Array]:
    experts, inputs = len(codes), 2 * codes.shape[-1]
    outputs = prod(codes.shape[1:-1])
    missing = -inputs % STEP
    pairs = jnp.pad(codes.reshape(experts, outputs, -1), ((0, 0), (0, 0), (0, missing // 2)))
    each = jnp.stack((pairs & 15, pairs >> 4), axis=-1).reshape(experts, outputs, -1, PLACES, GROUP).astype(jnp.int16)
    elements = jnp.zeros_like(each[:, :, :, 0])
    for place, bits in enumerate(BITS):
        for bit, at in enumerate(bits):
            elements = elements | (((each[:, :, :, place] >> bit) & 1) << at)
    words = jnp.pad(exponents.reshape(experts, outputs, -1), ((0, 0), (0, 0), (0, missing // GROUP))).astype(jnp.int32)
    words = words.reshape(experts, outputs, -1, PLACES)
    factors = sum((words[..., place] << 8 * place for place in range(1, PLACES)), words[..., 0])
    tiles = jnp.pad(elements, ((0, 0), (0, -outputs % TILE), (0, 0), (0, 0)))
    tiles = tiles.reshape(experts, -1, TILE, *elements.shape[2:]).transpose(0, 1, 3, 2, 4)
    return tiles, factors.transpose(0, 2, 1)
