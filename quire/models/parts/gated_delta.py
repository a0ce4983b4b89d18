"""The gated delta rule: a recurrent layer whose matrix forgets, and is corrected by each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.models.context import PlatformOps
from quire.models.params import Array, Param, ParamTree, Tensor, params_of
from quire.models.parts.norm import RMSNorm
from quire.ops.attention.heads import Rotation
from quire.ops.recurrence import Recurrence, RecurrentSpec
from quire.ops.weights.products import matmul, project, project_sums
from quire.ops.weights.rounded_rows import Rows, Sums

UNIT_EPS = 1e-6  # of the norms of queries and keys


@dataclass(frozen=True)
class GatedDelta:
    """A `Mixer`. Queries, keys and values go through the convolution and queries and keys get the length one.

    The factor of a matrix is exp(-exp(a_log) softplus(a + dt_bias)) and the rate is sigmoid(b). The output is
    normalised head by head and multiplied by silu(z).
    """

    spec: RecurrentSpec
    qkvz: Param  # [k, 2 i + 2 g v, d]: of a key head its query, its key, its values and their z
    ba: Param  # [k, 2 g, d]
    conv: Param  # [k, 2 i + g v, taps]
    a_log: Param  # [k, g]
    dt_bias: Param  # [k, g]
    norm: RMSNorm
    out: Param  # [d, k, g, v]

    @property
    def rope(self) -> None:
        return None

    def params(self) -> ParamTree:
        return params_of(
            qkvz=self.qkvz,
            ba=self.ba,
            conv=self.conv,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            norm=self.norm,
            out=self.out,
        )

    def __call__(
        self, weights: ParamTree, x: Rows, rotation: Rotation | None, state: Any, ops: PlatformOps
    ) -> tuple[Sums, Any]:
        spec = self.spec
        shape = (len(x), spec.key_heads, spec.group, spec.value_dim)
        qkvz = project("td,kcd->tkc", x, weights["qkvz"])
        b, a = jnp.split(matmul(x, weights["ba"]), 2, axis=-1)  # [t, k, g]
        mixed, state = ops.recurrent.convolve(qkvz[:, :, : spec.channels], weights["conv"], None, state)
        mixed = jax.nn.silu(mixed)
        q, k = (
            self._of_length_one(part, scale, ops)
            for part, scale in (
                (mixed[:, :, : spec.key_dim], spec.key_dim**-0.5),
                (mixed[:, :, spec.key_dim : 2 * spec.key_dim], 1.0),
            )
        )
        values = mixed[:, :, 2 * spec.key_dim :].reshape(shape)
        decay = -jnp.exp(weights["a_log"]) * jax.nn.softplus(a + weights["dt_bias"])
        tokens = Recurrence(q, k, values, decay, jax.nn.sigmoid(b))
        out, state = ops.recurrent.recur(spec.corrects, tokens, state)
        z = qkvz[:, :, spec.channels :].reshape(shape).astype(jnp.float32)
        out = self.norm(weights["norm"], out, ops.norms) * jax.nn.silu(z)
        return project_sums("tkgv,dkgv->td", out.astype(x.dtype), weights["out"], None, ops.products), state

    def _of_length_one(self, x: jax.Array, scale: float, ops: PlatformOps) -> jax.Array:
        """x [t, k, i] over its length, times `scale`. It is an RMS norm, so that the platform's order of sums holds."""
        size = x.shape[-1]
        weight = jnp.full(size, scale * size**-0.5, jnp.float32)
        return ops.norms.rms(x, weight, UNIT_EPS / size, 0.0)

    def for_devices(self, num_devices: int) -> "GatedDelta":
        """Devices have some of the key heads each, or all of them where they cannot be divided."""
        return self


def gated_delta(name: str, spec: RecurrentSpec, embed: int, eps: float) -> GatedDelta:
    heads, keys, values = spec.key_heads, spec.key_dim, spec.group * spec.value_dim
    rows = 2 * keys + 2 * values
    conv = Tensor(f"{name}.conv1d.weight", (heads * spec.channels, 1, spec.taps))

    def by_head(tensors: Sequence[Array]) -> Array:
        """The channels of all queries, then of all keys, then of all values, by key head."""
        parts = np.split(tensors[0].reshape(-1, spec.taps), (heads * keys, 2 * heads * keys))
        return np.concatenate([part.reshape(heads, -1, spec.taps) for part in parts], axis=1)

    def of_heads(part: str) -> Param:
        shape = (heads, spec.group)
        source = Tensor(f"{name}.{part}", (heads * spec.group,))
        return Param(shape, ("kv_heads", None), (source,), is_float32=True)

    def projection(part: str, rows: int) -> Param:
        source = Tensor(f"{name}.{part}.weight", (heads * rows, embed))
        return Param((heads, rows, embed), ("kv_heads", None, "embed"), (source,), num_contracted=1)

    return GatedDelta(
        spec,
        qkvz=projection("in_proj_qkvz", rows),
        ba=projection("in_proj_ba", 2 * spec.group),
        conv=Param((heads, spec.channels, spec.taps), ("kv_heads", None, None), (conv,), by_head),
        a_log=of_heads("A_log"),
        dt_bias=of_heads("dt_bias"),
        norm=RMSNorm(f"{name}.norm", spec.value_dim, eps),
        out=Param(
            (embed, heads, spec.group, spec.value_dim),
            ("embed", "kv_heads", None, None),
            (Tensor(f"{name}.out_proj.weight", (embed, heads * values)),),
            num_contracted=3,
        ),
    )
