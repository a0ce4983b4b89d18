"""The products of experts on a mesh of devices: each device has some of the features between the two products.

A device gates its own features, and its part of the second product is a sum over them, so that the devices add up what
they have of each token, once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from quire.ops.expert_choice import ExpertChoice, Shares
from quire.ops.sharding import TENSOR, sharding
from quire.ops.weights.experts import NONE, ExpertKernels, Gate
from quire.ops.weights.weight import Weight

WHOLE = PartitionSpec()  # type: ignore[no-untyped-call]
OF_FEATURES = PartitionSpec(None, None, TENSOR)  # type: ignore[no-untyped-call]
GATE_UP_AXES = ("experts", "mlp", None, None, "embed")
DOWN_AXES = ("experts", "embed", "mlp")


def sharded_experts(kernels: ExpertKernels, mesh: Mesh) -> ExpertKernels:
    if kernels is NONE:
        return NONE  # the compiler partitions grouped products

    run = partial(_run, mesh)

    def product(
        x: jax.Array, expert: jax.Array, weight: Weight, bias: jax.Array | None = None, gate: Gate | None = None
    ) -> jax.Array | None:
        if gate is None:
            return None
        cut, has_features = _cut(weight, GATE_UP_AXES, mesh)
        bias_cut = WHOLE if bias is None else sharding(bias.shape, GATE_UP_AXES[:-1], mesh).spec

        def on_own(x: jax.Array, expert: jax.Array, weight: Weight, bias: jax.Array | None) -> jax.Array | None:
            return kernels.product(x, expert, weight.part_of_device(), bias, gate)

        given = weight.rounded_visits(x, expert), expert, weight.without_rounding(), bias
        cuts = WHOLE, WHOLE, cut.without_rounding(), bias_cut
        return run(on_own, given, cuts, OF_FEATURES if has_features else WHOLE)  # type: ignore[no-any-return]

    def total(
        x: jax.Array, expert: jax.Array, share: jax.Array | None, weight: Weight, bias: jax.Array | None = None
    ) -> jax.Array | None:
        cut, has_features = _cut(weight, DOWN_AXES, mesh)
        if has_features is None:
            return None

        def on_own(x: jax.Array, expert: jax.Array, share: jax.Array | None, weight: Weight) -> jax.Array | None:
            out = kernels.total(x, expert, share, weight.part_of_device())
            if not has_features or out is None:
                return out
            return jax.lax.psum(out, TENSOR)  # type: ignore[no-untyped-call, no-any-return]

        given = weight.rounded_visits(x, expert), expert, share, weight.without_rounding()
        cuts = OF_FEATURES if has_features else WHOLE, WHOLE, WHOLE, cut.without_rounding()
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


def _cut(weight: Weight, axes: tuple[str | None, ...], mesh: Mesh) -> tuple[Weight, bool | None]:
    """The cuts of a weight's arrays, and whether a device has some of the features; None if its parts of the arrays
    are not those of the same features, as where it would have a part of a group."""
    of_features: list[tuple[int, bool]] = []

    def spec(array: Any, axes: tuple[str | None, ...]) -> PartitionSpec:
        found = sharding(array.shape, axes, mesh).spec
        cuts = zip(array.shape, axes, found, strict=True)
        of_features.extend((length, cut == TENSOR) for length, axis, cut in cuts if axis == "mlp")
        return found

    cut = weight.map(spec, axes)
    # A single scale is for all features.
    found = {is_cut for length, is_cut in of_features if length > 1} or {is_cut for _, is_cut in of_features}
    return cut, found.pop() if len(found) == 1 else None
