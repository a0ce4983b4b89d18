"""Latent attention: keys and values of all heads come from one latent vector of each token, and that is cached.

The matrices that make keys and values of a latent are applied to queries and to outputs in their place, so that all
heads read the same cached vectors: one key for all queries, and its first features are its value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from quire.models.context import PlatformOps
from quire.models.params import Array, Param, ParamTree, Tensor, params_of
from quire.models.parts.norm import RMSNorm
from quire.models.parts.projection import bias
from quire.models.parts.rope import Rope
from quire.ops.attention.heads import Rotation, latent, rotate
from quire.ops.attention.spec import AttentionSpec
from quire.ops.sharding import key_copies
from quire.ops.weights.products import project, project_sums
from quire.ops.weights.rounded_rows import Rows, Sums
from quire.ops.weights.rounded_rows import values as values_of


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a layer. A query has `plain` features for the latent, and `rotated` ones for those of the key."""

    embed: int
    heads: int
    rank: int  # of the latent
    plain: int
    rotated: int
    value: int
    query_rank: int | None  # queries come from a latent of their own
    rotates_pairs: bool  # the checkpoint's rope turns neighbouring features


@dataclass(frozen=True)
class LatentAttention:
    """Implements `Mixer`. The weights of heads have axes [k, g]: copies of the latent, and the heads that read each."""

    spec: AttentionSpec
    rope: Rope
    query: Param  # [k, g, plain + rotated, d or query_rank]
    key: Param  # [rank + rotated, d]
    key_norm: RMSNorm
    key_up: Param  # [k, g, rank, plain]
    value_up: Param  # [k, g, value, rank]
    out: Param  # [d, k, g, value]
    query_down: Param | None = None  # [query_rank, d]
    query_norm: RMSNorm | None = None
    query_down_bias: Param | None = None
    key_bias: Param | None = None
    out_bias: Param | None = None

    def params(self) -> ParamTree:
        return params_of(
            query_down=self.query_down,
            query_down_bias=self.query_down_bias,
            query_norm=self.query_norm,
            query=self.query,
            key=self.key,
            key_bias=self.key_bias,
            key_norm=self.key_norm,
            key_up=self.key_up,
            value_up=self.value_up,
            out=self.out,
            out_bias=self.out_bias,
        )

    def __call__(
        self, weights: ParamTree, x: Rows, rotation: Rotation | None, state: Any, ops: PlatformOps
    ) -> tuple[Sums, Any]:
        assert rotation is not None
        inner = x
        if self.query_norm is not None:
            inner = project("td,rd->tr", x, weights["query_down"], weights.get("query_down_bias"))
            inner = self.query_norm(weights["query_norm"], inner, ops.norms)
        query = project("td,kghd->tkgh", inner, weights["query"])
        rank, plain = self.key_up.shape[2:]
        met = weights["key_up"].product_by_head(query[..., :plain])
        query = jnp.concatenate((met, rotate(query[..., plain:], rotation)), axis=-1)

        key = project("td,rd->tr", x, weights["key"], weights.get("key_bias"))
        latents = self.key_norm(weights["key_norm"], key[:, :rank], ops.norms)
        key = jnp.concatenate((latents, rotate(key[:, rank:], rotation)), axis=-1)
        keys = jnp.broadcast_to(key[:, None], (len(x), self.spec.kv_heads, key.shape[1]))

        out, state = ops.attend(self.spec, latent(query, keys), state)
        values = weights["value_up"].product_by_head(values_of(out))
        return project_sums("tkgv,dkgv->td", values, weights["out"], weights.get("out_bias"), ops.products), state

    def for_devices(self, num_devices: int) -> "LatentAttention":
        """Each device has the latents of all tokens, and some of the heads."""
        copies = key_copies(self.spec.kv_heads, self.spec.group, num_devices)
        spec = replace(self.spec, kv_heads=copies, group=self.spec.group // copies)

        def by_device(param: Param, axis: int = 0) -> Param:
            shape = (*param.shape[:axis], spec.kv_heads, spec.group, *param.shape[axis + 2 :])
            apart = None if param.apart is None else by_device(param.apart, axis)
            return replace(param, shape=shape, apart=apart)

        return replace(
            self,
            spec=spec,
            query=by_device(self.query),
            key_up=by_device(self.key_up),
            value_up=by_device(self.value_up),
            out=by_device(self.out, axis=1),
        )


def latent_attention(name: str, sizes: LatentSizes, scale: float, rope: Rope, *, biased: bool) -> LatentAttention:
    """An attention with the names of DeepSeek's checkpoints."""
    heads, rank, width = sizes.heads, sizes.rank, sizes.plain + sizes.rotated
    query_rank, names = sizes.query_rank, ("q_proj", "q_b_proj")
    query_inputs = sizes.embed if query_rank is None else query_rank
    query = Tensor(f"{name}.{names[query_rank is not None]}.weight", (heads * width, query_inputs))
    key = Tensor(f"{name}.kv_a_proj_with_mqa.weight", (rank + sizes.rotated, sizes.embed))
    key_bias = Tensor(f"{name}.kv_a_proj_with_mqa.bias", (rank + sizes.rotated,))
    out = Tensor(f"{name}.o_proj.weight", (sizes.embed, heads * sizes.value))

    def key_rows(tensors: Sequence[Array]) -> Array:
        rows: Array = _in_halves(sizes, tensors[0][None], rank)[0]
        return rows

    attention = LatentAttention(
        AttentionSpec(1, heads, rank + sizes.rotated, scale, value_dim=rank),
        rope,
        query=Param(
            (1, heads, width, query_inputs),
            ("kv_heads", None, None, "embed" if query_rank is None else None),
            (query,),
            lambda tensors: _in_halves(sizes, tensors[0].reshape(heads, width, -1), sizes.plain),
            num_contracted=1,
        ),
        key=Param(key.shape, (None, "embed"), (key,), key_rows, num_contracted=1),
        key_norm=RMSNorm(f"{name}.kv_a_layernorm", rank, 1e-6),
        key_up=_of_latents(name, sizes, is_of_keys=True),
        value_up=_of_latents(name, sizes, is_of_keys=False),
        out=Param((sizes.embed, 1, heads, sizes.value), ("embed", "kv_heads", None, None), (out,), num_contracted=3),
        key_bias=Param(key_bias.shape, (None,), (key_bias,), key_rows) if biased else None,
        out_bias=bias(f"{name}.o_proj.bias", sizes.embed, "embed") if biased else None,
    )
    if query_rank is None:
        return attention
    down = Tensor(f"{name}.q_a_proj.weight", (query_rank, sizes.embed))
    down_bias = Tensor(f"{name}.q_a_proj.bias", (query_rank,))
    return replace(
        attention,
        query_down=Param(down.shape, (None, "embed"), (down,), num_contracted=1),
        query_norm=RMSNorm(f"{name}.q_a_layernorm", query_rank, 1e-6),
        query_down_bias=Param(down_bias.shape, (None,), (down_bias,)) if biased else None,
    )


def _in_halves(sizes: LatentSizes, rows: Array, first: int) -> Array:
    """Rows [m, n, ...] with the rotated ones, from `first` on, in the order in which a pair is half of them apart."""
    if not sizes.rotates_pairs:
        return rows
    count = sizes.rotated
    return rows[:, np.r_[0:first, first : first + count : 2, first + 1 : first + count : 2]]


def _of_latents(name: str, sizes: LatentSizes, *, is_of_keys: bool) -> Param:
    """The matrices that make keys of latents, transposed, or those that make values. Both are stored as one tensor, or
    as two in the form that is used."""
    width = sizes.plain + sizes.value
    tensor = Tensor(f"{name}.kv_b_proj.weight", (sizes.heads * width, sizes.rank))

    shape = (1, sizes.heads, *((sizes.rank, sizes.plain) if is_of_keys else (sizes.value, sizes.rank)))

    def join(tensors: Sequence[Array]) -> Array:
        rows = tensors[0].reshape(sizes.heads, width, sizes.rank)
        return np.swapaxes(rows[:, : sizes.plain], 1, 2) if is_of_keys else rows[:, sizes.plain :]

    axes = ("kv_heads", None, None, None)
    own = Tensor(f"{name}.{'k' if is_of_keys else 'v'}_b_proj.weight", shape[1:])
    apart = Param(shape, axes, (own,), is_widened=True)
    return Param(shape, axes, (tensor,), join, transposes=is_of_keys, is_widened=True, apart=apart)
