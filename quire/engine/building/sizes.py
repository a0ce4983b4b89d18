"""The sizes that an executor and a scheduler begin with."""

from jax.sharding import Mesh

from quire.core.limits import Limits
from quire.executor.layer_state import PageLayout
from quire.executor.shapes import Shapes
from quire.models.parts.decoder import Decoder
from quire.ops.gpu.capability import this_gpu
from quire.ops.kernels import kernels_for
from quire.settings.config import Config
from quire.settings.resolve import Facts, Resolved


def shapes_of(
    model: Decoder, mesh: Mesh | None, facts: Facts, resolved: Resolved, layout: PageLayout, limits: Limits
) -> Shapes:
    """The sizes of the executor's arrays and programs, before its pages are counted."""
    allows_fresh = all(spec.allows_fresh_kernel for spec in model.layers)
    kernels = kernels_for(facts.platform, resolved.dtype, mesh, this_gpu(), resolved.fixed_order)
    full_groups = tuple(group for group, reach in enumerate(layout.groups) if reach is None)
    shares = facts.platform == "gpu" and limits.prefix_caching
    shares &= any(spec.shares_prefixes for spec in model.layers)
    return Shapes(
        num_pages=2,
        page_size=resolved.page_size,
        num_slots=resolved.num_slots,
        max_prefill_tokens=resolved.max_batch_prefill_tokens,
        max_sequence_tokens=resolved.max_total_tokens,
        num_groups=len(layout.groups),
        min_tokens=resolved.min_tokens,
        is_fine=facts.platform != "cpu",
        skips_padding=kernels.skips_padding and (resolved.quantize != "int8" or facts.fast_int8),
        specialised=facts.platform == "gpu",
        max_fresh_sequences=kernels.max_fresh_sequences if allows_fresh else 0,
        guesses=limits.max_guesses,
        step_guesses=limits.max_step_guesses,
        page_dtype=resolved.page_dtype,
        burst=resolved.max_burst,
        shared_groups=full_groups if shares else (),
        fixed_order=resolved.fixed_order,
    )


def limits_of(config: Config, resolved: Resolved, layout: PageLayout) -> Limits:
    """The bounds of the scheduler, before its pages are counted."""
    return Limits(
        page_size=resolved.page_size,
        num_pages=2,
        max_batch_size=resolved.max_batch_size,
        max_step_tokens=resolved.max_batch_size + resolved.max_batch_prefill_tokens,
        max_batch_prefill_tokens=resolved.max_batch_prefill_tokens,
        max_sequence_tokens=resolved.max_total_tokens,
        max_batch_total_tokens=config.max_batch_total_tokens,
        max_queued=resolved.max_queued,
        waiting_served_ratio=resolved.waiting_served_ratio,
        max_waiting_tokens=resolved.max_waiting_tokens,
        prefix_caching=config.prefix_caching,
        max_burst=resolved.max_burst,
        replays=resolved.fixed_order,
        forces_tokens=not resolved.fixed_order,
        max_guesses=resolved.speculate,
        looks_up=config.draft_model is None,
        page_groups=layout.groups,
        snapshots=0 if layout.slot_specs else None,
    )
