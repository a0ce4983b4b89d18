"""The kernels of one NVIDIA GPU, written in Pallas, which XLA compiles by Triton into the graph of a step."""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from quire.ops.attention.heads import Heads
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import Kernels
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.expert_choice import Shares
from quire.ops.expert_choice import choose as plainly_chosen
from quire.ops.gpu import add_norm, expert_choice, rounded_rows
from quire.ops.gpu.adapter_product import add_products
from quire.ops.gpu.capability import GpuCapability
from quire.ops.gpu.decode_attention import decode_attention, decode_parts
from quire.ops.gpu.expert_product import expert_product
from quire.ops.gpu.filter_cuts import filter_cuts
from quire.ops.gpu.hopper import coded_prompts
from quire.ops.gpu.hopper.attention import (
    coded_decode_attention,
    coded_decode_parts,
    coded_prefill_attention,
    rounded_decode_attention,
    with_decodes,
)
from quire.ops.gpu.hopper.products import CODE_PRODUCT, FEW_ROWS, gated_product
from quire.ops.gpu.latent_attention import IN_LITTLE_MEMORY, latent_attention
from quire.ops.gpu.move_pages import gather, scatter
from quire.ops.gpu.place_heads import place_heads
from quire.ops.gpu.prefill_attention import prefill_attention
from quire.ops.gpu.recurrence import convolve_single, recur_single
from quire.ops.gpu.token_draws import draw_tokens
from quire.ops.norms import Norms
from quire.ops.page_moves import PageMoves
from quire.ops.pages import CodedPages, KVWriteTargets, PagedContext, Pages, Segments
from quire.ops.recurrence import RecurrentKernels, recur_in_tiles
from quire.ops.recurrence import convolve as plainly_convolved
from quire.ops.sampling_kernels import SamplingKernels
from quire.ops.slot_access import SlotAccess
from quire.ops.weights.coded import Coded
from quire.ops.weights.experts import Gate, kernels_of
from quire.ops.weights.rounded_rows import PLAIN as PLAIN_PRODUCTS
from quire.ops.weights.rounded_rows import (
    Activation,
    ProductKernels,
    RoundedRows,
    Rows,
    ScaledSums,
    Sums,
    gated_values,
)

log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_FRESH_SEQUENCES = 8  # padding costs time, and the attention of many short prompts does not take much of it

# As functions of their own, they are traced and lowered once for all the layers of a step that are alike.


place = jax.jit(place_heads)


def attend_by(
    decode: Callable[..., jax.Array],
    prefill: Callable[..., jax.Array] = prefill_attention,
    alone: Callable[..., Rows] | None = None,
    apart: Callable[..., jax.Array | None] | None = None,
) -> Callable[..., Rows]:
    """Attention by these kernels: one for the single tokens, and one for the others. Single tokens without others, or
    padding, have the kernel `alone`, if there is one. The others have the kernel `apart`, if there is one: it gives an
    array of its own, or None where it is not for them."""

    @jax.jit
    def attend(q: jax.Array, context: PagedContext) -> Rows:
        single, num_tiles = context.tiles.num_single, len(context.tiles)
        if single == num_tiles:
            kernel = decode if alone is None or len(q) > single else alone
            return kernel(q, context)
        decodes, prefills = context.part(0, single), context.part(single, num_tiles)
        out = decode(q, decodes) if single else None
        own = None if apart is None else apart(q, prefills)
        if own is not None:
            return own if out is None else with_decodes(own, out, decodes.tiles)
        return prefill(q, prefills, out)

    return attend


attend = attend_by(decode_attention)
attend_and_round = attend_by(decode_attention, alone=partial(rounded_decode_attention, decode_parts))
attend_on_hopper = attend_by(
    coded_decode_attention, alone=partial(rounded_decode_attention, coded_decode_parts), apart=coded_prefill_attention
)


@cache
def warn_of_plain_latent_attention() -> None:
    log.warning("this latent attention has no kernel for this GPU: plain XLA runs in its place, many times slower")


def plain_latent_attention(q: jax.Array, context: PagedContext) -> jax.Array:
    warn_of_plain_latent_attention()
    return tiled_attention(q, context)


def latent_by(kernel: Callable[..., jax.Array], q: jax.Array, context: PagedContext) -> jax.Array:
    """[t, k, g, value_dim] by a kernel for the single tokens, and for the others. Layers of kinds that no model has are
    computed by XLA, and the log says so."""
    if not context.spec.sees_all or context.sinks is not None:
        return plain_latent_attention(q, context)
    single, out = context.tiles.num_single, None
    for part in (context.part(0, single), context.part(single, len(context.tiles))):
        out = kernel(q, part, out) if len(part.tiles) else out
    assert out is not None
    return out


attend_latent = jax.jit(partial(latent_by, latent_attention))
attend_latent_in_little_memory = jax.jit(partial(latent_by, partial(latent_attention, many=IN_LITTLE_MEMORY)))


@partial(jax.jit, static_argnums=0)
def attend_fresh(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array | None:
    """By cuDNN, where it has a kernel: in half the time that ours takes over long prompts."""
    if not spec.sees_all or spec.softcap is not None or q.dtype == jnp.float32 or spec.head_dim > 128:
        return None
    queries = q.reshape(1, len(q), -1, spec.head_dim)
    if len(segments.offsets) == 1:
        return jax.nn.dot_product_attention(
            queries, k[None], v[None], scale=spec.scale, is_causal=True, implementation="cudnn"
        ).reshape(q.shape)
    from jax._src.cudnn import fused_attention_stablehlo as packed_attention

    offsets, lengths = jnp.append(segments.offsets, -1)[None], segments.lengths[None]
    out: jax.Array = packed_attention.dot_product_attention(
        queries,
        k[None],
        v[None],
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=spec.scale,
        mask_type=packed_attention.MaskType.PADDING_CAUSAL,
    )
    return out.reshape(q.shape)


@partial(jax.jit, static_argnums=0)
def prompt_in_codes(
    spec: AttentionSpec, heads: Heads, pages: Pages, targets: KVWriteTargets
) -> tuple[Rows, Pages] | None:
    if not coded_prompts.fits(spec, pages, len(targets.pages)):
        return None
    assert isinstance(pages, CodedPages)
    return coded_prompts.attend_to_prompt(spec, heads, pages, targets)


add_rms_norm = jax.jit(add_norm.add_norm, static_argnums=(3, 4))
add_visits_rms_norm = jax.jit(add_norm.add_visits_norm, static_argnums=(3, 4))
adapter_product = jax.jit(add_products, static_argnames="gated")
round_rows = jax.jit(rounded_rows.round_rows, static_argnums=1)
add_rms_norm_rounded = jax.jit(rounded_rows.add_norm, static_argnums=(3, 4, 5))


@partial(jax.jit, static_argnums=(0, 2))
def gate(activation: Activation, both: Sums, code_dtype: Any) -> RoundedRows:
    parts = (both.sums if isinstance(both, ScaledSums) else both).shape[1]
    if activation is not jax.nn.silu or parts > 1:  # not all functions can be part of a kernel
        return rounded_rows.round_rows(gated_values(activation, both), code_dtype)
    return rounded_rows.gate(activation, both, code_dtype)


@partial(jax.jit, static_argnums=(1, 2))
def choose_experts(
    scores: jax.Array, chosen: int, shares: Shares, is_real: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    choose = expert_choice.choose if chosen <= expert_choice.MAX_CHOSEN else plainly_chosen
    return choose(scores, chosen, shares, is_real)


@jax.jit
def convolve(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, inputs: jax.Array, access: SlotAccess
) -> tuple[jax.Array, jax.Array]:
    """In one launch where all tokens are single, and the layer has a state."""
    is_single = access.tiles.num_single == len(access.tiles) == len(x) and inputs.shape[1] > 0
    return (convolve_single if is_single else plainly_convolved)(x, weight, bias, inputs, access)


recur = jax.jit(partial(recur_in_tiles, recur_single=recur_single), static_argnums=0)

GPU = Kernels(
    place,
    attend,
    attend_fresh,
    MAX_FRESH_SEQUENCES,
    # Large products add to what is there themselves, which a kernel after them would read and write again.
    decode_norms=Norms(add_rms=add_rms_norm, add_visits_rms=add_visits_rms_norm),
    sampling=SamplingKernels(filter_cuts, draw_tokens=draw_tokens),
    adapter_product=adapter_product,
    recurrent=RecurrentKernels(convolve, recur),
    attend_latent=attend_latent,
    experts=kernels_of(expert_product, choose_experts),
    products=ProductKernels(round_rows, add_rms_norm_rounded, gate),
    moves=PageMoves(gather, scatter),
)


def _plain_for_e4m3(
    kernel: Callable[Arguments, Result], plain: Callable[Arguments, Result]
) -> Callable[Arguments, Result]:
    """The plain function for codes of e4m3, whose type is the last argument; else the kernel."""

    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        return (plain if arguments[-1] == jnp.float8_e4m3fn else kernel)(*arguments, **named)

    return run


def expert_product_without_fp8(
    x: jax.Array, expert: jax.Array, weight: Any, bias: jax.Array | None = None, gate: Gate | None = None
) -> jax.Array | None:
    if isinstance(weight, Coded) and weight.codes.dtype == jnp.float8_e4m3fn:
        return None
    return expert_product(x, expert, weight, bias, gate)


# Triton converts e4m3 by instructions that older GPUs lack. XLA does without them.
GPU_WITHOUT_FP8 = GPU._replace(
    experts=kernels_of(expert_product_without_fp8, choose_experts),
    products=ProductKernels(
        _plain_for_e4m3(GPU.products.rows, PLAIN_PRODUCTS.rows),
        _plain_for_e4m3(GPU.products.add_rms, PLAIN_PRODUCTS.add_rms),
        _plain_for_e4m3(GPU.products.gate, PLAIN_PRODUCTS.gate),
    ),
)


def gpu_kernels(gpu: GpuCapability) -> Kernels:
    """The kernels that a GPU runs."""
    kernels = GPU if gpu.fp8_refusal is None else GPU_WITHOUT_FP8
    if not gpu.packed_attention:
        kernels = kernels._replace(max_fresh_sequences=1)
    if gpu.is_hopper:
        products = kernels.products._replace(
            product=CODE_PRODUCT if gpu.code_product else None,
            few_rows=FEW_ROWS if gpu.mosaic else None,
            gated_product=gated_product if gpu.mosaic else None,
        )
        kernels = kernels._replace(
            attend=attend_on_hopper if gpu.mosaic else attend_and_round,
            prompt_in_codes=prompt_in_codes if gpu.prompt_in_codes else None,
            products=products,
        )
    if gpu.has_much_shared_memory:
        return kernels
    return kernels._replace(
        attend_latent=attend_latent_in_little_memory if gpu.latent_attention else plain_latent_attention
    )
