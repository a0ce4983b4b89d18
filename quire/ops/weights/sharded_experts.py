"""The products of experts on a mesh of devices: each device has some of the features between the two products.

A device gates its own features, and its part of the second product is a sum over them, so that the devices add up what
they have of each token, once.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from quire.ops.expert_choice import ExpertChoice, Shares
from quire.ops.sharding import TENSOR, sharding
from quire.ops.weights.coded import Coded
from quire.ops.weights.expert_product import NONE, ExpertKernels, Gate, rounded_rows

WHOLE = PartitionSpec()  # type: ignore[no-untyped-call]
OF_FEATURES = PartitionSpec(None, None, TENSOR)  # type: ignore[no-untyped-call]
GATE_UP_AXES = ("experts", "mlp", None, None, "embed")
DOWN_AXES = ("experts", "embed", "mlp")


def sharded_experts(kernels: ExpertKernels, mesh: Mesh) -> ExpertKernels:
    if kernels is NONE:
        return NONE  # the compiler partitions grouped products

    def specs(weight: Any, axes: tuple[str | None, ...]) -> Any:
        """The cuts of the arrays of a weight."""

        def spec(array: Any, axes: tuple[str | None, ...]) -> PartitionSpec:
            return sharding(array.shape, axes, mesh).spec

        return weight.map(spec, axes) if isinstance(weight, Coded) else spec(weight, axes)

    run = partial(_run, mesh)

    def product(
        x: jax.Array, expert: jax.Array, weight: Any, bias: jax.Array | None = None, gate: Gate | None = None
    ) -> jax.Array | None:
        if gate is None:
            return None
        cut = specs(weight, GATE_UP_AXES)
        bias_cut = WHOLE if bias is None else specs(bias, GATE_UP_AXES[:-1])
        is_cut = _codes(cut)[1] == TENSOR

        def on_own(x: jax.Array, expert: jax.Array, weight: Any, bias: jax.Array | None) -> jax.Array | None:
            return kernels.product(x, expert, _own(weight), bias, gate)

        given = rounded_rows(x, expert, weight), expert, _without_rounding(weight), bias
        cuts = WHOLE, WHOLE, _without_rounding(cut), bias_cut
        return run(on_own, given, cuts, OF_FEATURES if is_cut else WHOLE)  # type: ignore[no-any-return]

    def total(
        x: jax.Array, expert: jax.Array, share: jax.Array | None, weight: Any, bias: jax.Array | None = None
    ) -> jax.Array | None:
        cut = specs(weight, DOWN_AXES)
        is_cut = _codes(cut)[2] == TENSOR
        if is_cut and isinstance(weight, Coded) and weight.scales.shape[-1] > 1 and cut.scales[2] != TENSOR:
            return None  # a device has parts of groups

        def on_own(x: jax.Array, expert: jax.Array, share: jax.Array | None, weight: Any) -> jax.Array | None:
            out = kernels.total(x, expert, share, _own(weight))
            if not is_cut or out is None:
                return out
            return jax.lax.psum(out, TENSOR)  # type: ignore[no-untyped-call, no-any-return]

        given = rounded_rows(x, expert, weight), expert, share, _without_rounding(weight)
        cuts = OF_FEATURES if is_cut else WHOLE, WHOLE, WHOLE, _without_rounding(cut)
        out = run(on_own, given, cuts, WHOLE)
        if out is None or bias is None:
            return out  # type: ignore[no-any-return]
        biases = bias[expert].astype(jnp.float32)
        return out + jnp.sum(biases if share is None else biases * share[:, :, None], axis=1)  # type: ignore[no-any-return]

    return ExpertKernels(product, total, partial(_choose_everywhere, kernels.choose, mesh))


def _run(mesh: Mesh, function: Any, given: tuple[Any, ...], cuts: tuple[Any, ...], out: PartitionSpec) -> Any:
    return jax.shard_map(function, mesh=mesh, in_specs=cuts, out_specs=out, check_vma=False)(*given)


def _choose_everywhere(
    choose: ExpertChoice,
    mesh: Mesh,
    scores: jax.Array,
    chosen: int,
    shares: Shares,
    is_real: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """An `ExpertChoice` that every device makes, of all tokens."""

    def on_each(scores: jax.Array, is_real: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return choose(scores, chosen, shares, is_real)

    return _run(mesh, on_each, (scores, is_real), (WHOLE, WHOLE), WHOLE)  # type: ignore[no-any-return]


def _codes(cut: Any) -> Any:
    """The cut of the matrices themselves, an entry for each axis."""
    return cut.codes if isinstance(cut, Coded) else cut


def _without_rounding(weight: Any) -> Any:
    """For rows that are rounded already."""
    return replace(weight, rounding=None, input_scale=None, input_zero=None) if isinstance(weight, Coded) else weight


def _own(weight: Any) -> Any:
    """A device's part of a weight, with its own shape."""
    if not isinstance(weight, Coded):
        return weight
    shape = weight.codes.shape
    return replace(weight, shape=(*shape[:-1], shape[-1] * 8 // weight.bits))
