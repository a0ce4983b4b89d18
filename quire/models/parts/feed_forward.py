"""The feed-forward block of a layer, dense or of experts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

import jax
import jax.numpy as jnp

from quire.models.context import PlatformOps
from quire.models.fields import Fields
from quire.models.params import Param, ParamTree, params_of
from quire.models.parts.projection import (
    BaseWeight,
    Weight,
    code_dtype,
    joined_product,
    matmul,
    pending_product,
    project,
    project_sums,
    split_mlp,
)
from quire.models.parts.routing import Router
from quire.ops.gates import ClampedGate, PlainGate, tanh_gelu
from quire.ops.weights.adapters import AdaptedWeight, JoinedStack
from quire.ops.weights.coded import Coded
from quire.ops.weights.four_bit_experts import FourBitExperts
from quire.ops.weights.grouped_product import ragged_product
from quire.ops.weights.native_weight import NativeWeight
from quire.ops.weights.quantized import Grouped, Packed, gated_grouped_product, gated_product, grouped_product
from quire.ops.weights.rounded_rows import BlockOutput, Rows, Sums, gated_values, scaled, values
from quire.ops.weights.rounding import rounded
from quire.ops.weights.visit_sums import VisitSums

Activation = Callable[[jax.Array], jax.Array]

# By the names configs use.
ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": tanh_gelu,
    "gelu_fast": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
}


def read_activation(fields: Fields, name: str = "hidden_act", default: str = "silu") -> Activation:
    activation = fields.text(name, default)
    if activation not in ACTIVATIONS:
        raise fields.unsupported(name, f"known activations are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


class FeedForward(Protocol):
    def params(self) -> ParamTree: ...

    def __call__(self, weights: ParamTree, x: Rows, ops: PlatformOps) -> BlockOutput: ...

    def for_devices(self, num_devices: int) -> Self:
        """The same function with weights that so many devices can share."""


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x))"""

    activation: Activation
    gate_up: Param  # [p, 2, m / p, d]
    down: Param  # [d, m]
    gate_up_bias: Param | None = None  # [p, 2, m / p]
    down_bias: Param | None = None

    def params(self) -> ParamTree:
        return params_of(gate_up=self.gate_up, down=self.down, gate_up_bias=self.gate_up_bias, down_bias=self.down_bias)

    def __call__(self, weights: ParamTree, x: Rows, ops: PlatformOps) -> BlockOutput:
        gate_up, down, down_bias = weights["gate_up"], weights["down"], weights.get("down_bias")
        if self._gates_with_adapters(gate_up):
            active = gate_up.add_to(joined_product(x, gate_up), values(x), gated=True)
            return pending_product("tm,dm->td", active, down, down_bias, ops.rounding)
        if (rows := self._gated_by_product(x, gate_up, down, ops)) is not None:
            return pending_product("tm,dm->td", rows, down, down_bias, ops.rounding)
        both = project_sums("td,pcmd->tpcm", x, gate_up, weights.get("gate_up_bias"), ops.rounding)
        base = down.weight if isinstance(down, AdaptedWeight) else down
        if isinstance(base, Packed) and self.activation is jax.nn.silu:
            pairs = scaled(both)[:, 0]
            out = gated_product(pairs, base)  # one kernel gates, quantises and multiplies
            if isinstance(down, AdaptedWeight):
                out = down.add_to(out, pairs, gated=True)
            return (out if down_bias is None else out + down_bias.astype(jnp.float32)).astype(x.dtype)
        dtype = code_dtype(down, len(x), ops.rounding)
        if dtype is None:
            rows = gated(self.activation, scaled(both))
        else:
            rows = ops.rounding.gate(self.activation, both, dtype)
        return pending_product("tm,dm->td", rows, down, down_bias, ops.rounding)

    def _gated_by_product(self, x: Rows, gate_up: Weight, down: Weight, ops: PlatformOps) -> Rows | None:
        """The rows of `down`, where the product with `gate_up` gates them itself."""
        make = ops.rounding.gated_product
        if make is None or self.gate_up_bias is not None or self.gate_up.shape[0] > 1:
            return None
        return make(self.activation, x, gate_up, down)

    def _gates_with_adapters(self, gate_up: Weight) -> bool:
        """True if what adds the adapters can gate too."""
        is_joined = isinstance(gate_up, AdaptedWeight) and isinstance(gate_up.stack, JoinedStack)
        is_plain = self.activation is jax.nn.silu and self.gate_up_bias is None and self.gate_up.shape[0] == 1
        return is_joined and is_plain

    def for_devices(self, num_devices: int) -> "GatedMLP":
        bias = self.gate_up_bias
        return replace(
            self,
            gate_up=split_mlp(self.gate_up, num_devices),
            gate_up_bias=None if bias is None else split_mlp(bias, num_devices),
        )


@dataclass(frozen=True)
class MLP:
    """down(activation(up(x))), with biases"""

    activation: Activation
    up: Param  # [m, d]
    up_bias: Param
    down: Param  # [d, m]
    down_bias: Param

    def params(self) -> ParamTree:
        return {"up": self.up, "up_bias": self.up_bias, "down": self.down, "down_bias": self.down_bias}

    def __call__(self, weights: ParamTree, x: Rows, ops: PlatformOps) -> Sums:
        wide = project("td,md->tm", x, weights["up"], weights["up_bias"])
        active = self.activation(wide.astype(jnp.float32)).astype(x.dtype)
        return project_sums("tm,dm->td", active, weights["down"], weights["down_bias"], ops.rounding)

    def for_devices(self, num_devices: int) -> "MLP":
        return self


@dataclass(frozen=True)
class Experts:
    """The sum of the gated MLPs that the router chooses for a token, weighted by their shares.

    Where it `scales_inputs`, shares are factors of what an expert is given, not of its output.

    Tokens are sorted by expert, so that the experts are one grouped matmul and each token visits its own only.
    """

    activation: Activation | ClampedGate
    router: Router
    gate_up: Param  # [e, p, 2, m / p, d]
    down: Param  # [e, d, m]
    gate_up_bias: Param | None = None  # [e, p, 2, m / p]
    down_bias: Param | None = None  # [e, d]
    scales_inputs: bool = False

    def params(self) -> ParamTree:
        return params_of(
            router=self.router,
            gate_up=self.gate_up,
            down=self.down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )

    def __call__(self, weights: ParamTree, x: Rows, ops: PlatformOps) -> jax.Array | VisitSums:
        x = values(x)
        # Padding visits no expert that the first token does not, so none is read for it.
        share, expert = self.router(weights["router"], x, ops.experts.choose, ops.is_real)
        if (found := self._by_kernels(weights, x, share, expert, ops)) is not None:
            return found
        tokens, chosen = expert.shape
        num_experts, *parts, embed = self.gate_up.shape
        if ops.is_real is not None:  # and here it visits none: its rows are behind all others
            expert = jnp.where(ops.is_real[:, None], expert, num_experts)
        order = jnp.argsort(expert.reshape(-1), stable=True)  # of the visits, [t * chosen]
        visits = jnp.bincount(expert.reshape(-1), length=num_experts)  # of each expert
        visited = expert.reshape(-1)[order]

        def biased(found: jax.Array, name: str) -> jax.Array:
            bias = weights.get(f"{name}_bias")
            return found if bias is None else found + bias[visited].astype(jnp.float32).reshape(found.shape)

        inputs, share = x[order // chosen], share.reshape(-1)[order][:, None]
        if self.scales_inputs:
            inputs = (inputs.astype(jnp.float32) * share).astype(x.dtype)
        both = biased(grouped(inputs, weights["gate_up"], visits), "gate_up").astype(x.dtype).reshape(-1, *parts)
        down = weights["down"]
        if isinstance(down, Packed) and self.activation is jax.nn.silu:
            outputs = gated_grouped_product(both[:, 0], down, visits)  # one kernel gates, quantises and multiplies
        else:
            outputs = grouped(gated(self.activation, both), down, visits)
        outputs = biased(outputs, "down")
        outputs = outputs if self.scales_inputs else outputs * share
        return jnp.zeros((tokens, embed), jnp.float32).at[order // chosen].add(outputs).astype(x.dtype)

    def _by_kernels(
        self, weights: ParamTree, x: jax.Array, share: jax.Array, expert: jax.Array, ops: PlatformOps
    ) -> jax.Array | VisitSums | None:
        """By the platform's kernels, if it has some for these weights. Tokens stay in their order."""
        inputs, kernels = x[:, None], ops.experts
        if self.scales_inputs:
            inputs = (inputs.astype(jnp.float32) * share[:, :, None]).astype(x.dtype)
        gate = gate_of(self.activation)
        active = kernels.product(inputs, expert, weights["gate_up"], weights.get("gate_up_bias"), gate)
        if active is None:
            return None
        shares = None if self.scales_inputs else share
        down, bias = weights["down"], weights.get("down_bias")
        if shares is not None and ops.norms.add_visits_rms is not None:
            visits = kernels.product(active, expert, down, bias)
            if visits is not None:
                return VisitSums(visits, shares, x.dtype)
        out = kernels.total(active, expert, shares, down, bias)
        return None if out is None else out.astype(x.dtype)

    def for_devices(self, num_devices: int) -> "Experts":
        bias = self.gate_up_bias
        return replace(
            self,
            gate_up=split_mlp(self.gate_up, num_devices, axis=1),
            gate_up_bias=None if bias is None else split_mlp(bias, num_devices, axis=1),
        )


@dataclass(frozen=True)
class SharedExperts:
    """Experts, and beside them a gated MLP that all tokens visit, times the sigmoid of `gate` where there is one."""

    experts: Experts
    shared: GatedMLP
    gate: Param | None = None  # [1, d]

    def params(self) -> ParamTree:
        return params_of(experts=self.experts, shared=self.shared, gate=self.gate)

    def __call__(self, weights: ParamTree, x: Rows, ops: PlatformOps) -> jax.Array:
        shared = scaled(self.shared(weights["shared"], x, ops))
        if self.gate is not None:
            share = jax.nn.sigmoid(matmul(x, weights["gate"], 1))
            shared = rounded((shared.astype(jnp.float32) * share).astype(x.dtype))
        return scaled(self.experts(weights["experts"], x, ops)) + shared

    def for_devices(self, num_devices: int) -> "SharedExperts":
        experts, shared = self.experts.for_devices(num_devices), self.shared.for_devices(num_devices)
        return replace(self, experts=experts, shared=shared)


def gate_of(activation: Activation | ClampedGate) -> PlainGate | ClampedGate:
    return activation if isinstance(activation, ClampedGate) else PlainGate(activation)


def gated(activation: Activation | ClampedGate, both: jax.Array) -> jax.Array:
    """activation(gate) * up of both [t, p, 2, m / p]: [t, m]."""
    if not isinstance(activation, ClampedGate):
        return gated_values(activation, both)
    gate, up = (both[:, :, part].astype(jnp.float32) for part in range(2))
    return activation(gate, up).astype(both.dtype).reshape(len(both), -1)


def grouped(x: jax.Array, weights: BaseWeight | FourBitExperts, sizes: jax.Array) -> jax.Array:
    """x [n, in] times matrices [e, ..., in], the next for each run of `sizes` rows: float32 [n, outputs]."""
    if isinstance(weights, NativeWeight):
        return weights.grouped_product(x, sizes)
    if isinstance(weights, FourBitExperts):
        weights = weights.coded()
    if isinstance(weights, Coded):
        return weights.grouped_product(x, sizes, grouped)
    if isinstance(weights, Packed | Grouped):
        return grouped_product(x, weights, sizes, grouped)
    assert isinstance(weights, jax.Array), "experts are of one kind"
    return ragged_product(x, weights.reshape(weights.shape[0], -1, weights.shape[-1]), sizes)
