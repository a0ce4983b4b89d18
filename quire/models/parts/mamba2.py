"""Mamba 2: a recurrent layer whose matrix forgets as much as a token says."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.models.context import PlatformOps
from quire.models.params import Array, Param, ParamTree, Tensor, params_of
from quire.models.parts.norm import GroupedRMSNorm
from quire.ops.attention.heads import Rotation
from quire.ops.recurrence import Recurrence, RecurrentSpec
from quire.ops.sharding import key_copies
from quire.ops.weights.products import project, project_sums, rounded
from quire.ops.weights.rounded_rows import Rows, Sums


@dataclass(frozen=True)
class Mamba2:
    """A `Mixer`. Of a token x, B and C go through the convolution: they are its values, its key and its query.

    A token's rate is dt = softplus(its own + dt_bias), and its factor exp(-exp(a_log) dt). `skip` times x is added to
    the output, which is multiplied by silu(gate) and normalised over the heads of each B and C.
    """

    spec: RecurrentSpec
    inputs: Param  # [k, 2 g v + 2 i + g, d]: of a key head the gates and x of its heads, its B and C, their dt
    conv: Param  # [k, g v + 2 i, taps]
    conv_bias: Param | None  # [k, g v + 2 i]
    a_log: Param  # [k, g]
    dt_bias: Param  # [k, g]
    skip: Param  # [k, g]
    norm: GroupedRMSNorm
    out: Param  # [d, k, g, v]

    @property
    def rope(self) -> None:
        return None

    def params(self) -> ParamTree:
        return params_of(
            inputs=self.inputs,
            conv=self.conv,
            conv_bias=self.conv_bias,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            skip=self.skip,
            norm=self.norm,
            out=self.out,
        )

    def __call__(
        self, weights: ParamTree, x: Rows, rotation: Rotation | None, state: Any, ops: PlatformOps
    ) -> tuple[Sums, Any]:
        spec = self.spec
        shape, width = (len(x), spec.key_heads, spec.group, spec.value_dim), spec.group * spec.value_dim
        projected = project("td,kcd->tkc", x, weights["inputs"])
        gates, mixed, steps = jnp.split(projected, (width, width + spec.channels), axis=-1)
        convolved, state = ops.recurrent.convolve(mixed, weights["conv"], weights.get("conv_bias"), state)
        convolved = jax.nn.silu(convolved)
        values = convolved[:, :, :width].reshape(shape)
        key, query = jnp.split(convolved[:, :, width:], 2, axis=-1)
        dt = jax.nn.softplus(steps.astype(jnp.float32) + weights["dt_bias"])
        tokens = Recurrence(query, key, values, -jnp.exp(weights["a_log"]) * dt, dt)
        out, state = ops.recurrent.recur(spec.corrects, tokens, state)
        out = out + rounded(weights["skip"][..., None] * values)
        out = out * jax.nn.silu(gates.astype(jnp.float32)).reshape(shape)
        out = self.norm(weights["norm"], out.reshape(len(x), -1), ops.norms).reshape(shape)
        return project_sums("tkgv,dkgv->td", out.astype(x.dtype), weights["out"], None, ops.products), state

    def for_devices(self, num_devices: int) -> "Mamba2":
        """The same function; if there are fewer key heads than devices, with copies of B and C, each for a part of
        their heads."""
        spec = self.spec
        copies = key_copies(spec.key_heads, spec.group, num_devices)
        values, heads, group = spec.group * spec.value_dim, spec.key_heads * copies, spec.group // copies
        mixed = ((values, False), (2 * spec.key_dim, True))
        channels = values // copies + 2 * spec.key_dim

        def reshaped(param: Param) -> Param:
            return replace(param, shape=(heads, group))

        return replace(
            self,
            spec=replace(spec, key_heads=heads, group=group, channels=channels),
            inputs=_with_copies(self.inputs, ((values, False), *mixed, (spec.group, False)), copies),
            conv=_with_copies(self.conv, mixed, copies),
            conv_bias=None if self.conv_bias is None else _with_copies(self.conv_bias, mixed, copies),
            a_log=reshaped(self.a_log),
            dt_bias=reshaped(self.dt_bias),
            skip=reshaped(self.skip),
            out=replace(self.out, shape=(self.out.shape[0], heads, group, spec.value_dim)),
        )


def _with_copies(param: Param, parts: Sequence[tuple[int, bool]], copies: int) -> Param:
    """The rows [k, rows, ...] of `param` for `copies` times as many key heads. Of each head the parts of so many rows
    are divided among its copies, or repeated."""
    ends = np.cumsum([count for count, _ in parts])[:-1]
    rows = sum(count if is_repeated else count // copies for count, is_repeated in parts)
    heads, join = param.shape[0] * copies, param.join
    assert join is not None

    def divided(part: Array, is_repeated: bool) -> Array:
        return np.repeat(part, copies, axis=0) if is_repeated else part.reshape(heads, -1, *part.shape[2:])

    def join_copies(tensors: Sequence[Array]) -> Array:
        found = zip(np.split(join(tensors), ends, axis=1), parts, strict=True)
        return np.concatenate([divided(part, is_repeated) for part, (_, is_repeated) in found], axis=1)

    return replace(param, shape=(heads, rows, *param.shape[2:]), join=join_copies)


def mamba2(name: str, spec: RecurrentSpec, embed: int, eps: float, *, has_bias: bool) -> Mamba2:
    heads, keys, values = spec.key_heads, spec.key_dim, spec.group * spec.value_dim
    channels = (values, keys, keys)

    def join(parts: Sequence[int], tensors: Sequence[Array]) -> Array:
        """Rows of all heads, part after part, by key head."""
        ends = np.cumsum([0, *parts]) * heads
        rows = [tensors[0][begin:end] for begin, end in pairwise(ends)]
        return np.concatenate([part.reshape(heads, -1, *part.shape[1:]) for part in rows], axis=1)

    def of_heads(part: str) -> Param:
        source = Tensor(f"{name}.{part}", (heads * spec.group,))
        return Param((heads, spec.group), ("kv_heads", None), (source,), is_float32=True)

    parts = (values, *channels, spec.group)
    bias = Tensor(f"{name}.conv1d.bias", (heads * spec.channels,))
    return Mamba2(
        spec,
        inputs=Param(
            (heads, sum(parts), embed),
            ("kv_heads", None, "embed"),
            (Tensor(f"{name}.in_proj.weight", (heads * sum(parts), embed)),),
            lambda tensors: join(parts, tensors),
            num_contracted=1,
        ),
        conv=Param(
            (heads, spec.channels, spec.taps),
            ("kv_heads", None, None),
            (Tensor(f"{name}.conv1d.weight", (heads * spec.channels, 1, spec.taps)),),
            lambda tensors: join(channels, [tensors[0][:, 0]]),
        ),
        conv_bias=(
            Param((heads, spec.channels), ("kv_heads", None), (bias,), lambda tensors: join(channels, tensors))
            if has_bias
            else None
        ),
        a_log=of_heads("A_log"),
        dt_bias=of_heads("dt_bias"),
        skip=of_heads("D"),
        norm=GroupedRMSNorm(f"{name}.norm", heads, values, eps),
        out=Param(
            (embed, heads, spec.group, spec.value_dim),
            ("embed", "kv_heads", None, None),
            (Tensor(f"{name}.out_proj.weight", (embed, heads * values)),),
            num_contracted=3,
        ),
    )
