"""Kernels on a mesh of devices: each device runs them on its own heads.

The compiler cannot partition a kernel, so `shard_map` does. Keys, values and their queries are independent of each
other up to the projection that follows attention, so the kernels need no communication. Heads that the devices do not
divide stay whole, as their weights and pages do: every device then computes all of them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from quire.ops.adapters import add_products
from quire.ops.attention_spec import AttentionSpec
from quire.ops.heads import Heads
from quire.ops.norms import Norms, rms_norm
from quire.ops.pages import KVWriteTargets, Pages, Segments, Tiles
from quire.ops.recurrence import Recurrence, RecurrentKernels, convolve
from quire.ops.rounded_rows import PLAIN as PLAIN_ROUNDING
from quire.ops.rounded_rows import scaled
from quire.ops.sharded_experts import sharded_experts
from quire.ops.slot_access import SlotAccess
from quire.ops.step_attention import Kernels
from quire.sharding import PAGE_AXES, PAGE_SCALE_AXES, sharding

WHOLE = PartitionSpec()  # type: ignore[no-untyped-call]


def sharded(kernels: Kernels, mesh: Mesh) -> Kernels:
    """The same kernels over the heads of each device. Norms and `filter_cuts` run whole on every device."""

    def on_each(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def whole(function: Callable[..., Any]) -> Callable[..., Any]:
        """Arrays are replicated; other arguments are constants."""

        def run(*arguments: Any) -> Any:
            arrays = [argument for argument in arguments if isinstance(argument, jax.Array)]
            constants = [argument for argument in arguments if not isinstance(argument, jax.Array)]
            return on_each(lambda *arrays: function(*arrays, *constants), (WHOLE,) * len(arrays), WHOLE)(*arrays)

        return run

    def by_head(array: jax.Array) -> PartitionSpec:
        """The sharding of an array [t, k, ...]."""
        return sharding(array.shape, (None, "kv_heads", *[None] * (array.ndim - 2)), mesh).spec

    def by_page(pages: Pages) -> Any:
        def spec(array: jax.Array) -> PartitionSpec:
            return sharding(array.shape, PAGE_AXES if array.ndim == len(PAGE_AXES) else PAGE_SCALE_AXES, mesh).spec

        return jax.tree.map(spec, pages)

    def place(heads: Heads, pages: Pages, targets: KVWriteTargets) -> tuple[jax.Array, Pages]:
        if any(norm is not None and norm.weight.ndim > 1 for norm in (heads.q_norm, heads.k_norm)):
            heads = heads.with_norms_done(rms_norm)  # over all heads, of which a device has some
        heads = heads.with_scales_applied()
        of_heads, of_pages = by_head(scaled(heads.qkv)), by_page(pages)
        fields: list[Any] = [of_heads, WHOLE, WHOLE, WHOLE, None]
        run = on_each(kernels.place, (Heads(*fields), of_pages, WHOLE), (of_heads, of_pages))
        return run(heads, pages, targets)  # type: ignore[no-any-return]

    def attend_by(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        @wraps(kernel)  # its module names the kernels
        def attend(
            spec: AttentionSpec,
            q: jax.Array,
            pages: Pages,
            page_table: jax.Array,
            tiles: Tiles,
            sinks: jax.Array | None = None,
        ) -> jax.Array:
            def on_own_heads(q: jax.Array, *others: Any) -> jax.Array:
                return kernel(replace(spec, kv_heads=q.shape[1]), q, *others)

            of_sinks = None if sinks is None else sharding(sinks.shape, ("kv_heads", None), mesh).spec
            run = on_each(on_own_heads, (by_head(q), by_page(pages), WHOLE, WHOLE, of_sinks), by_head(q))
            return run(q, pages, page_table, tiles, sinks)  # type: ignore[no-any-return]

        return attend

    def attend_fresh(
        spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments
    ) -> jax.Array | None:
        def on_own_heads(q: jax.Array, *others: Any) -> jax.Array | None:
            return kernels.attend_fresh(replace(spec, kv_heads=q.shape[1]), q, *others)

        run = on_each(on_own_heads, (by_head(q), by_head(k), by_head(v), WHOLE), by_head(q))
        return run(q, k, v, segments)  # type: ignore[no-any-return]

    def recur(
        corrects: bool, tokens: Recurrence, matrices: jax.Array, access: SlotAccess
    ) -> tuple[jax.Array, jax.Array]:
        def on_own_heads(*arguments: Any) -> tuple[jax.Array, jax.Array]:
            return kernels.recurrent.recur(corrects, *arguments)

        of_tokens: Any = jax.tree.map(by_head, tokens)
        of_matrices = by_head(matrices)
        run = on_each(on_own_heads, (of_tokens, of_matrices, WHOLE), (by_head(tokens.v), of_matrices))
        return run(tokens, matrices, access)  # type: ignore[no-any-return]

    return kernels._replace(
        place=place,
        recurrent=RecurrentKernels(convolve, recur),  # the compiler partitions the convolution
        attend=attend_by(kernels.attend),
        attend_latent=attend_by(kernels.attend_latent),
        attend_fresh=attend_fresh,
        norms=Norms(*(whole(norm) for norm in kernels.norms)),
        decode_norms=Norms(*(whole(norm) for norm in kernels.decode_norms)),
        adapter_product=add_products,  # plain: the compiler partitions it
        experts=sharded_experts(kernels.experts, mesh),
        rounding=PLAIN_ROUNDING,  # the same
        filter_cuts=None if kernels.filter_cuts is None else whole(kernels.filter_cuts),
    )
