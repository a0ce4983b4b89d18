"""The outputs of experts before they are added up, for a reader that adds them itself: a norm, in one launch."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["visits", "shares"], meta_fields=["dtype"])
@dataclass(frozen=True)
class VisitSums:
    """The sums over the experts of a token of their outputs, each times its share."""

    visits: jax.Array  # float32 [t, chosen, d]
    shares: jax.Array  # float32 [t, chosen]
    dtype: Any  # that the model rounds the sums to

    def __len__(self) -> int:
        return len(self.visits)

    def numbers(self) -> jax.Array:
        """float32 [t, d]"""
        return jnp.sum(self.visits * self.shares[:, :, None], axis=1)
