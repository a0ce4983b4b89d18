"""Weights that are joined from tensors of different forms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.weights.rounded_rows import CodeProduct, Rows
from quire.ops.weights.weight import Axes, Weight, code_dtype


@partial(jax.tree_util.register_dataclass, data_fields=["weights", "order"], meta_fields=["shape", "num_contracted"])
@dataclass(frozen=True)
class Parts(Weight):
    """A matrix joined of tensors that are quantised differently, each of which is multiplied on its own."""

    weights: tuple[Weight, ...]  # [rows, inputs] each
    order: Any  # int32 [outputs]: for each the row of the parts, counted through all of them
    shape: tuple[int, ...]
    num_contracted: int = 1

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.concatenate([part.product(x) for part in self.weights], axis=1)[:, self.order]

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> "Parts":
        parts = tuple(part.map(change, (axes[0], axes[-1])) for part in self.weights)
        return replace(self, weights=parts, order=change(self.order, (None,)))

    def native(self) -> "Parts":
        return self._with(Weight.native)

    def direct(self, forms: Sequence[Callable[[Any], Weight | None]] = ()) -> "Parts":
        return self._with(lambda part: part.direct(forms))

    def for_rows(self, num_rows: jax.Array) -> "Parts":
        return self._with(lambda part: part.for_rows(num_rows))

    def row_code_dtype(self, num_rows: int, kernel: CodeProduct | None) -> Any | None:
        return code_dtype(self.weights, num_rows, kernel)

    @property
    def widened_bytes(self) -> int:
        return max(part.widened_bytes for part in self.weights)

    @property
    def has_codes(self) -> bool:
        return any(part.has_codes for part in self.weights)

    @property
    def gains_from_timings(self) -> bool:
        return any(part.gains_from_timings for part in self.weights)

    def _with(self, change: Callable[[Weight], Weight]) -> "Parts":
        return replace(self, weights=tuple(map(change, self.weights)))
