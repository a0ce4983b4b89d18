"""Kernels on a mesh of devices: each device runs them on its own heads.

The compiler cannot partition a kernel, so `shard_map` does. Keys, values and their queries are independent of each
other up to the projection that follows attention, so the kernels need no communication. Heads that the devices do not
divide stay whole, as their weights and pages do: every device then computes all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, cast

import jax
from jax.sharding import Mesh, PartitionSpec

from quire.ops.attention.heads import Heads
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import Kernels
from quire.ops.norms import Norms, rms_norm
from quire.ops.page_moves import PLAIN_MOVES
from quire.ops.pages import KVWriteTargets, PagedContext, Pages, Segments
from quire.ops.recurrence import Recurrence, RecurrentKernels, convolve
from quire.ops.sampling_kernels import SamplingKernels
from quire.ops.sharding import PAGE_AXES, PAGE_SCALE_AXES, sharding
from quire.ops.slot_access import SlotAccess
from quire.ops.weights.adapters import add_products
from quire.ops.weights.rounded_rows import PLAIN as PLAIN_PRODUCTS
from quire.ops.weights.rounded_rows import Rows, scaled, values
from quire.ops.weights.sharded_experts import sharded_experts

WHOLE = PartitionSpec()  # type: ignore[no-untyped-call]


def sharded(kernels: Kernels, mesh: Mesh) -> Kernels:
    """The same kernels over the heads of each device. Norms and sampling run whole on every device."""
    devices = _Devices(mesh)
    return kernels._replace(
        place=_sharded_place(kernels.place, devices),
        # The compiler partitions the convolution.
        recurrent=RecurrentKernels(convolve, _sharded_recur(kernels.recurrent.recur, devices)),
        attend=_sharded_attend(kernels.attend, devices),
        attend_latent=_sharded_attend(kernels.attend_latent, devices),
        attend_fresh=_sharded_attend_fresh(kernels.attend_fresh, devices),
        prompt_in_codes=None,  # a device would have scales of its own heads alone
        norms=_whole_norms(kernels.norms, devices),
        decode_norms=_whole_norms(kernels.decode_norms, devices),
        adapter_product=add_products,  # plain: the compiler partitions it
        experts=sharded_experts(kernels.experts, mesh),
        products=PLAIN_PRODUCTS,  # the same
        moves=PLAIN_MOVES,  # the same
        sampling=_whole_sampling(kernels.sampling, devices),
        skips_padding=False,  # XLA's products do not
    )


@dataclass(frozen=True)
class _Devices:
    """Runs functions on each device of a mesh, and says which part of an array a device has."""

    mesh: Mesh

    def on_each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def on_whole_arrays(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Arrays are replicated; other arguments are constants."""

        def run(*arguments: Any) -> Any:
            arrays = [argument for argument in arguments if isinstance(argument, jax.Array)]
            constants = [argument for argument in arguments if not isinstance(argument, jax.Array)]
            return self.on_each(lambda *arrays: function(*arrays, *constants), (WHOLE,) * len(arrays), WHOLE)(*arrays)

        return run

    def by_head(self, array: jax.Array) -> PartitionSpec:
        """The sharding of an array [t, k, ...]."""
        return sharding(array.shape, (None, "kv_heads", *[None] * (array.ndim - 2)), self.mesh).spec

    def by_page(self, pages: Pages) -> Any:
        def spec(array: jax.Array) -> PartitionSpec:
            axes = PAGE_AXES if array.ndim == len(PAGE_AXES) else PAGE_SCALE_AXES
            return sharding(array.shape, axes, self.mesh).spec

        return jax.tree.map(spec, pages)

    def of_sinks(self, sinks: jax.Array | None) -> PartitionSpec | None:
        return None if sinks is None else sharding(sinks.shape, ("kv_heads", None), self.mesh).spec


def _whole_sampling(kernels: SamplingKernels, devices: _Devices) -> SamplingKernels:
    """Draws are those of XLA, which does not gather the logits for them."""
    whole, (cuts, find, _) = devices.on_whole_arrays, kernels

    def highest(values: jax.Array, num_rows: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        assert find is not None
        return whole(find)(values, num_rows)  # type: ignore[no-any-return]

    return SamplingKernels(None if cuts is None else whole(cuts), None if find is None else highest)


def _whole_norms(norms: Norms, devices: _Devices) -> Norms:
    """The outputs of experts are added up across devices before."""
    whole = devices.on_whole_arrays
    return Norms(whole(norms.rms), whole(norms.add_rms), whole(norms.layer))


def _sharded_place(kernel: Callable[..., Any], devices: _Devices) -> Callable[..., Any]:
    def place(heads: Heads, pages: Pages, targets: KVWriteTargets) -> tuple[jax.Array, Pages]:
        if any(norm is not None and norm.weight.ndim > 1 for norm in (heads.q_norm, heads.k_norm)):
            heads = heads.with_norms_done(rms_norm)  # over all heads, of which a device has some
        heads = heads.with_scales_applied()
        of_heads, of_pages = devices.by_head(scaled(heads.qkv)), devices.by_page(pages)
        fields: list[Any] = [of_heads, WHOLE, WHOLE, WHOLE, None]
        run = devices.on_each(kernel, (Heads(*fields), of_pages, WHOLE), (of_heads, of_pages))
        return run(heads, pages, targets)  # type: ignore[no-any-return]

    return place


def _sharded_attend(kernel: Callable[..., Rows], devices: _Devices) -> Callable[..., jax.Array]:
    @wraps(kernel)  # its module names the kernels
    def attend(q: jax.Array, context: PagedContext) -> jax.Array:
        def on_own_heads(q: jax.Array, context: PagedContext) -> jax.Array:
            out = kernel(q, replace(context, spec=replace(context.spec, kv_heads=q.shape[1])))
            return values(out).reshape(*q.shape[:-1], -1)  # codes would be those of own heads alone

        of_heads, whole = devices.by_head(q), cast(Any, WHOLE)
        pages, sinks = devices.by_page(context.pages), cast(Any, devices.of_sinks(context.sinks))
        of_context = replace(context, pages=pages, page_table=whole, tiles=whole, sinks=sinks)
        return devices.on_each(on_own_heads, (of_heads, of_context), of_heads)(q, context)  # type: ignore[no-any-return]

    return attend


def _sharded_attend_fresh(kernel: Callable[..., Any], devices: _Devices) -> Callable[..., Any]:
    def attend_fresh(
        spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments
    ) -> jax.Array | None:
        def on_own_heads(q: jax.Array, *others: Any) -> Any:
            return kernel(replace(spec, kv_heads=q.shape[1]), q, *others)

        of_heads = devices.by_head(q)
        run = devices.on_each(on_own_heads, (of_heads, devices.by_head(k), devices.by_head(v), WHOLE), of_heads)
        return run(q, k, v, segments)  # type: ignore[no-any-return]

    return attend_fresh


def _sharded_recur(kernel: Callable[..., Any], devices: _Devices) -> Callable[..., Any]:
    def recur(
        corrects: bool, tokens: Recurrence, matrices: jax.Array, access: SlotAccess
    ) -> tuple[jax.Array, jax.Array]:
        of_tokens: Any = jax.tree.map(devices.by_head, tokens)
        of_matrices = devices.by_head(matrices)
        in_specs, out_specs = (of_tokens, of_matrices, WHOLE), (devices.by_head(tokens.v), of_matrices)
        run = devices.on_each(partial(kernel, corrects), in_specs, out_specs)
        return run(tokens, matrices, access)  # type: ignore[no-any-return]

    return recur
