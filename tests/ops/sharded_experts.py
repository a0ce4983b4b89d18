"""Run by test_sharded_kernels.py in a process with 8 devices: the experts of a layer by kernels, against one device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.models.context import PlatformOps
from quire.models.formats.channel_weights import channel_weight
from quire.models.params import Param, Tensor
from quire.models.parts.feed_forward import Experts
from quire.models.parts.projection import router
from quire.models.parts.routing import SoftmaxRouter
from quire.ops.attention.reference import whole_sequence
from quire.ops.gates import ClampedGate
from quire.ops.gpu.expert_product import expert_product
from quire.ops.sharding import tensor_mesh
from quire.ops.weights.coded import Coded
from quire.ops.weights.experts import NONE, kernels_of
from quire.ops.weights.floats import PlainWeight
from quire.ops.weights.sharded_experts import DOWN_AXES, GATE_UP_AXES, sharded_experts

EXPERTS, CHOSEN, EMBED = 8, 2, 64


def param(axes: tuple[str | None, ...], *shape: int) -> Param:
    return Param(shape, axes, (Tensor("drawn", shape),))


def block(devices: int, mlp: int) -> Experts:
    """As `for_devices` cuts it, where the devices divide its features."""
    parts = devices if mlp % devices == 0 else 1
    return Experts(
        ClampedGate(1.702, 7.0),
        SoftmaxRouter(CHOSEN, True, router("router", EXPERTS, EMBED)),
        param(GATE_UP_AXES, EXPERTS, parts, 2, mlp // parts, EMBED),
        param(DOWN_AXES, EXPERTS, EMBED, mlp),
        param(GATE_UP_AXES[:-1], EXPERTS, parts, 2, mlp // parts),
        param(DOWN_AXES[:-1], EXPERTS, EMBED),
    )


def mxfp4(weight: jax.Array) -> Coded:
    codes = (weight[..., ::2].astype(jnp.float32) * 500).astype(jnp.int32).astype(jnp.uint8)
    scales = jnp.full((*weight.shape[:-1], weight.shape[-1] // 32), 122, jnp.uint8).at[..., ::2].set(123)
    return Coded(
        codes=codes, scales=scales, zeros=None, index=None, input_scale=None, input_zero=None,
        shape=weight.shape, num_contracted=1, is_of_experts=True, bits=4, group=32,
    )  # fmt: skip


def weights_of(experts: Experts, kind: str) -> Any:
    chance = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(chance.standard_normal(shape) / 4, jnp.bfloat16)

    def matrix(param: Param) -> Any:
        weight = drawn(param.shape)
        if kind == "mxfp4":
            return mxfp4(weight)
        return PlainWeight(weight) if kind == "floats" else channel_weight(weight, param, "fp8")

    assert experts.gate_up_bias is not None
    assert experts.down_bias is not None
    return {
        "router": {"weight": PlainWeight(drawn((EXPERTS, EMBED)))},
        "gate_up": matrix(experts.gate_up),
        "down": matrix(experts.down),
        "gate_up_bias": drawn(experts.gate_up_bias.shape),
        "down_bias": drawn(experts.down_bias.shape),
    }


def main() -> None:
    mesh = tensor_mesh(jax.devices())
    kernels = sharded_experts(kernels_of(partial(expert_product, interpret=True)), mesh)
    for kind, mlp, tokens in (
        ("floats", 64, 5),
        ("floats", 64, 70),
        ("floats", 36, 5),  # features stay whole
        ("fp8", 64, 70),
        ("mxfp4", 256, 5),
        ("mxfp4", 96, 5),  # a device would have parts of groups: not by the kernel
    ):
        experts = block(len(jax.devices()), mlp)
        weights = weights_of(experts, kind)
        x = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, EMBED)), jnp.bfloat16)
        with jax.default_matmul_precision("highest"):
            right, found = (
                np.asarray(
                    jax.jit(experts, static_argnums=2)(weights, x, PlatformOps(whole_sequence, experts=way)), np.float32
                )
                for way in (NONE, kernels)
            )
        # The last bit of a bfloat16 may give another code of an activation.
        most = 0.03 if kind == "fp8" else 0.01
        assert np.linalg.norm(found - right) < most * np.linalg.norm(right), (kind, mlp, tokens)
        text = (
            jax.jit(experts, static_argnums=2).lower(weights, x, PlatformOps(whole_sequence, experts=kernels)).as_text()
        )
        # The choice of experts, and both products.
        assert text.count("sdy.manual_computation") == (1 if mlp == 96 else 3), text
        print(f"experts: {kind}, {mlp} features, {tokens} tokens: as on one device")


if __name__ == "__main__":
    main()
