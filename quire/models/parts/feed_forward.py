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
from quire.models.parts.projection import split_mlp
from quire.models.parts.routing import Router
from quire.ops.gates import tanh_gelu
from quire.ops.weights.deferred import VisitSums
from quire.ops.weights.experts import Gate, GatedExperts
from quire.ops.weights.products import gated_mlp, matmul, project, project_sums, rounded
from quire.ops.weights.rounded_rows import BlockOutput, Rows, Sums, scaled, values

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
        biases = weights.get("gate_up_bias"), weights.get("down_bias")
        return gated_mlp(self.activation, x, weights["gate_up"], weights["down"], ops.products, *biases)

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
        return project_sums("tm,dm->td", active, weights["down"], weights["down_bias"], ops.products)

    def for_devices(self, num_devices: int) -> "MLP":
        return self


@dataclass(frozen=True)
class Experts:
    """The sum of the gated MLPs that the router chooses for a token, weighted by their shares.

    Where it `scales_inputs`, shares are factors of what an expert is given, not of its output.
    """

    gate: Gate
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
        biases = weights.get("gate_up_bias"), weights.get("down_bias")
        experts = GatedExperts(self.gate, weights["gate_up"], weights["down"], *biases, self.scales_inputs)
        leaves_sums = ops.norms.add_visits_rms is not None
        return experts.total(x, share, expert, ops.experts, leaves_sums=leaves_sums, is_real=ops.is_real)

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
            share = jax.nn.sigmoid(matmul(x, weights["gate"]))
            shared = rounded((shared.astype(jnp.float32) * share).astype(x.dtype))
        return scaled(self.experts(weights["experts"], x, ops)) + shared

    def for_devices(self, num_devices: int) -> "SharedExperts":
        experts, shared = self.experts.for_devices(num_devices), self.shared.for_devices(num_devices)
        return replace(self, experts=experts, shared=shared)
