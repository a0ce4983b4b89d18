"""Matrices of four-bit codes as one GPU reads them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp

from quire.ops.weights.coded import MIDDLE, Coded
from quire.ops.weights.rounded_rows import Rows
from quire.ops.weights.weight import Axes, Weight, flat_rows

PLACES = 4  # codes of an element
RUNS = (16, 64)  # the least and the most elements of a step: as many inputs as a product of blocks must have, or more
TILE = 16  # outputs whose elements of a step are side by side: memory is read in long pieces


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "factors"],
    meta_fields=["shape", "num_contracted", "group", "scale_dtype"],
)
@dataclass(frozen=True)
class FourBits(Weight):
    """A matrix [*outputs, *inputs] of `Coded`, in another order.

    The inputs are cut into steps of four runs, and an element of a step has a code of each run, the first in its lowest
    bits: two elements beside each other are two inputs beside each other in four ways, and each takes an instruction to
    widen. A factor is a scale in its higher half and a zero point in its lower; those of a group are side by side.
    """

    codes: Any  # int16 [outputs / TILE, steps, TILE, elements of a step]; outputs that are missing are zeros
    factors: Any  # int32 [groups, outputs]
    shape: tuple[int, ...]
    num_contracted: int  # of the last axes
    group: int  # inputs with the same scale
    scale_dtype: Any  # of two bytes

    @classmethod
    def of(cls, weight: Coded) -> Self | None:
        """None for one that has no such order."""
        inputs = prod(weight.shape[-weight.num_contracted :])
        group, run = weight.group, _run(weight.group)
        is_plain = weight.bits == 4 and weight.index is None and weight.rounding is None and not weight.is_of_experts
        step = PLACES * run
        is_whole = inputs % step == 0 and run.bit_count() == 1 and (group % step == 0 or step % group == 0)
        if not (is_plain and is_whole and inputs == group * weight.scales.shape[-1]):
            return None
        dtype = jnp.dtype(weight.scales.dtype)
        if dtype not in (jnp.bfloat16, jnp.float16):
            return None
        turn = partial(_turned, run, inputs)
        is_like = isinstance(weight.codes, jax.ShapeDtypeStruct)
        given = weight.codes, weight.scales, weight.zeros
        codes, factors = jax.eval_shape(turn, *given) if is_like else turn(*given)
        return cls(codes, factors, weight.shape, weight.num_contracted, group, dtype)

    @property
    def run(self) -> int:
        """Elements of a step, and inputs of each of its runs."""
        return _run(self.group)

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> Self:
        """Its arrays are on one device."""
        codes, factors = ((None,) * len(array.shape) for array in (self.codes, self.factors))
        return replace(self, codes=change(self.codes, codes), factors=change(self.factors, factors))

    @property
    def widened_bytes(self) -> int:
        return 4 * prod(self.shape)

    @property
    def has_codes(self) -> bool:
        return True

    @property
    def gains_from_timings(self) -> bool:
        return True

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        return self.widened_product(flat_rows(x))

    def widened_product(self, x: jax.Array) -> jax.Array:
        """float32 [t, outputs] of any number of rows x [t, inputs]."""
        outputs = self.factors.shape[1]
        codes = self.codes.transpose(0, 2, 1, 3).reshape(-1, *self.codes.shape[1::2])[:outputs]
        numbers = self._widened(codes, self.factors).astype(x.dtype)
        return jnp.einsum("ti,oi->to", x, numbers, preferred_element_type=jnp.float32)

    def rows(self, indices: jax.Array) -> jax.Array:
        return self._widened(self.codes[indices // TILE, :, indices % TILE], self.factors[:, indices])

    def _widened(self, codes: jax.Array, factors: jax.Array) -> jax.Array:
        """float32 [outputs, inputs] of some outputs' elements [outputs, steps, run] and factors [groups, outputs]."""
        elements = codes.astype(jnp.int32)[:, :, None, :]
        places = 4 * jnp.arange(PLACES).reshape(-1, 1)
        numbers = ((elements >> places) & 15).reshape(len(codes), len(factors), self.group)
        factors = factors.T[:, :, None]
        scales = jax.lax.bitcast_convert_type((factors >> 16).astype(jnp.int16), self.scale_dtype)
        found = (numbers - (factors & 0xFFFF)).astype(jnp.float32) * scales.astype(jnp.float32)
        return found.reshape(len(codes), -1)


def _run(group: int) -> int:
    least, most = RUNS
    return min(max(group // PLACES, least), most)


@partial(jax.jit, static_argnums=(0, 1))
def _turned(run: int, inputs: int, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> Any:
    pairs = codes.reshape(-1, inputs // 2)
    each = jnp.stack((pairs & 15, pairs >> 4), axis=-1).reshape(len(pairs), -1, PLACES, run).astype(jnp.int16)
    elements = sum((each[:, :, place] << 4 * place for place in range(1, PLACES)), each[:, :, 0])
    groups = scales.shape[-1]
    bits = jax.lax.bitcast_convert_type(scales.reshape(-1, groups), jnp.int16).astype(jnp.int32) << 16
    low = MIDDLE if zeros is None else zeros.reshape(-1, groups).astype(jnp.int32)
    tiles = jnp.pad(elements, ((0, -len(pairs) % TILE), (0, 0), (0, 0))).reshape(-1, TILE, *elements.shape[1:])
    return tiles.transpose(0, 2, 1, 3), (bits | low).T
