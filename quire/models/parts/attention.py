"""The attention block of a layer: projections, norms and rotation around the platform's attention."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from quire.models.context import PlatformOps
from quire.models.params import Param, ParamTree, params_of
from quire.models.parts.norm import HeadNorms
from quire.models.parts.projection import copy_keys
from quire.models.parts.rope import Rope
from quire.models.parts.temperature import QueryScale, QueryTemperature
from quire.ops.attention.heads import Heads, Rotation
from quire.ops.attention.spec import AttentionSpec
from quire.ops.sharding import key_copies
from quire.ops.weights.products import block_output, project_sums
from quire.ops.weights.rounded_rows import BlockOutput, Rows, scaled, values
from quire.ops.weights.weight import code_dtype


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention, with or without rope; `q_norm` and `k_norm` apply before it. In place of a rope it may
    have a temperature.

    Where it `is_gated`, each query is followed by a gate in `qkv`, whose sigmoid its output is multiplied by.
    """

    spec: AttentionSpec
    qkv: Param  # [k, g + 2, h, d]; with gates [k, 2 g + 2, h, d]
    out: Param  # [d, k, g, h]
    qkv_bias: Param | None = None
    out_bias: Param | None = None
    rope: Rope | QueryTemperature | None = None
    q_norm: HeadNorms | None = None
    k_norm: HeadNorms | None = None
    sinks: Param | None = None  # [k, g], where the spec has them
    is_gated: bool = False

    def params(self) -> ParamTree:
        return params_of(
            qkv=self.qkv,
            out=self.out,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            sinks=self.sinks,
        )

    def __call__(
        self, weights: ParamTree, x: Rows, rotation: Rotation | QueryScale | None, state: Any, ops: PlatformOps
    ) -> tuple[BlockOutput, Any]:
        qkv = project_sums("td,kghd->tkgh", x, weights["qkv"], weights.get("qkv_bias"), ops.products)
        gates = None
        if self.is_gated:
            both = scaled(qkv)
            gates = both[:, :, 1:-2:2]
            qkv = jnp.concatenate((both[:, :, :-2:2], both[:, :, -2:]), axis=2)
        if isinstance(rotation, QueryScale):
            qkv, rotation = _with_scaled_queries(scaled(qkv), rotation.factor), None
        heads = Heads(
            qkv,
            rotation,
            None if self.q_norm is None else self.q_norm.of_heads(weights["q_norm"]),
            None if self.k_norm is None else self.k_norm.of_heads(weights["k_norm"]),
            weights.get("sinks"),
        )
        read_in = None if self.is_gated else code_dtype(weights["out"], len(x), ops.products.product)
        out, state = ops.attend(replace(self.spec, read_in=read_in), heads, state)
        if gates is not None:
            wide = values(out).reshape(gates.shape).astype(jnp.float32)
            out = (wide * jax.nn.sigmoid(gates.astype(jnp.float32))).astype(out.dtype)
        return block_output("tkgh,dkgh->td", out, weights["out"], weights.get("out_bias"), ops.products), state

    def for_devices(self, num_devices: int) -> "Attention":
        """The same attention; if there are fewer keys than devices, with copies of key and value heads, each for a part
        of their queries."""
        copies = key_copies(self.spec.kv_heads, self.spec.group, num_devices)
        spec = replace(self.spec, kv_heads=self.spec.kv_heads * copies, group=self.spec.group // copies)
        q_norm, k_norm = (None if norm is None else norm.with_key_copies(copies) for norm in (self.q_norm, self.k_norm))
        return replace(
            self,
            spec=spec,
            qkv=copy_keys(self.qkv, copies),
            qkv_bias=None if self.qkv_bias is None else copy_keys(self.qkv_bias, copies),
            out=replace(self.out, shape=(self.out.shape[0], spec.kv_heads, spec.group, spec.head_dim)),
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=None if self.sinks is None else replace(self.sinks, shape=(spec.kv_heads, spec.group)),
        )


def _with_scaled_queries(qkv: jax.Array, factor: jax.Array) -> jax.Array:
    queries = qkv[:, :, :-2].astype(jnp.float32) * factor[:, None, None, None]
    return jnp.concatenate((queries.astype(qkv.dtype), qkv[:, :, -2:]), axis=2)
