"""Queries that grow with their positions, in layers that know positions by nothing else."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


class QueryScale(NamedTuple):
    """The factor of the queries of each token, float32 [t]."""

    factor: jax.Array


@dataclass(frozen=True)
class QueryTemperature:
    """The factor of a query is 1 + `scale` * log(1 + n), n the number of whole runs of `run_length` positions up to it.

    A layer has it in place of a rope.
    """

    run_length: int
    scale: float

    @property
    def depends_on_length(self) -> bool:
        return False

    def prefix_key(self, prompt_length: int) -> int:
        return 0

    @property
    def switch_length(self) -> int | None:
        return None

    def rotation(self, positions: jax.Array, lengths: jax.Array | None) -> QueryScale:
        runs = ((positions + 1) // self.run_length).astype(jnp.float32)
        return QueryScale(jnp.log1p(runs) * self.scale + 1.0)
