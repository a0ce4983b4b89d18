"""Kernels whose summation order for a row does not depend on the other rows of its step.

The other kernels of this folder choose their blocks, and divide contexts, by how much work a step has. Here blocks are
the same in every step, and a part of a context is determined by its positions alone.
"""

from functools import partial

import jax
import jax.numpy as jnp

from quire.ops.attention.step_attention import PLAIN, Kernels
from quire.ops.gpu.add_norm import norm
from quire.ops.gpu.decode_attention import OF_CODES, TILING, decode_attention
from quire.ops.gpu.decode_list import PART
from quire.ops.gpu.kernels import add_rms_norm, attend_by
from quire.ops.gpu.place_heads import place_heads
from quire.ops.gpu.prefill_attention import EXACT, ONE_ORDER, Tiling, prefill_attention
from quire.ops.norms import Norms
from quire.ops.pages import PagedContext

PLACED_TOKENS = 8  # of a program; no step has fewer


def tiling_of(dtype: jnp.dtype) -> Tiling:
    """The tiling of prompts, which elsewhere depends on the number of tokens."""
    return EXACT if dtype == jnp.float32 else ONE_ORDER


place = jax.jit(partial(place_heads, block=PLACED_TOKENS))


def decode(q: jax.Array, context: PagedContext) -> jax.Array:
    tiling = OF_CODES if len(context.pages) > 2 else TILING
    return decode_attention(q, context, part=PART, tiling=tiling, in_packs=True)


def prefill(q: jax.Array, context: PagedContext, out: jax.Array | None) -> jax.Array:
    return prefill_attention(q, context, out, tiling=tiling_of(q.dtype), max_parts=1, masks_all=True)


attend = attend_by(decode, prefill)


def with_fixed_order(kernels: Kernels) -> Kernels:
    """The kernels of a GPU, with a fixed order where they have one. Latent attention, recurrent layers, experts and
    adapters have none: models and settings that need them are refused earlier."""
    rms_norm = jax.jit(norm, static_argnums=(2, 3))
    norms = Norms(rms=rms_norm, add_rms=add_rms_norm)  # layer norms are XLA's
    return kernels._replace(
        place=place,
        attend=attend,
        attend_fresh=PLAIN.attend_fresh,  # none: cuDNN's summation order differs from our prefill's
        prompt_in_codes=None,
        max_fresh_sequences=0,
        norms=norms,
        decode_norms=norms,
        # More rows use XLA's products, whose summation order differs.
        products=kernels.products._replace(product=None, few_rows=None, gated_product=None),
    )
