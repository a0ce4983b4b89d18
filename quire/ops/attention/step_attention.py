"""Attention over the tokens of one step, and the kernels that a platform has for it."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from quire.ops.attention.heads import Heads
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.tiled_attention import tiled_attention
from quire.ops.norms import PLAIN as PLAIN_NORMS
from quire.ops.norms import Norms
from quire.ops.page_moves import PLAIN_MOVES, PageMoves
from quire.ops.pages import (
    KVWriteTargets,
    PageAccess,
    PagedContext,
    Pages,
    Segments,
    put,
    read_tokens,
    spread_for_cache,
    written,
)
from quire.ops.recurrence import PLAIN as PLAIN_RECURRENT
from quire.ops.recurrence import RecurrentKernels
from quire.ops.sampling_kernels import NONE as NO_SAMPLING_KERNELS
from quire.ops.sampling_kernels import SamplingKernels
from quire.ops.weights.adapters import AdapterProduct, add_products
from quire.ops.weights.experts import NONE as NO_EXPERT_KERNELS
from quire.ops.weights.experts import ExpertKernels
from quire.ops.weights.rounded_rows import PLAIN as PLAIN_PRODUCTS
from quire.ops.weights.rounded_rows import ProductKernels, Rows, scaled


class PromptInCodes(Protocol):
    def __call__(
        self, spec: AttentionSpec, heads: Heads, pages: Pages, targets: KVWriteTargets, /
    ) -> tuple[Rows, Pages] | None:
        """`step_attention` of one sequence from its first token on, with padding behind it, where rows and pages are
        codes; None where there is no kernel for them."""


def _declined(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> None:
    return None


class Kernels(NamedTuple):
    """The operations of a platform. `place` finishes the heads and writes keys and values, `attend` reads them.

    `attend_fresh` is for sequences that are computed from their first position on, with keys and values [t, k, h]. It
    may return None, and anything for padding; layers with sinks are not given to it. `attend` gives [t, k, g, h], or
    rows [t, k * g * h] that have codes.

    `decode_norms` are the norms of steps of decodes alone. `sampling` are those that choose tokens. `adapter_product`
    adds the products with adapters to others. `recurrent` is for layers with a recurrent state, `experts` for layers
    with experts. `products` are with weights in codes, and make the rows for them. `moves` copy pages between their
    arrays and blocks.
    """

    place: Callable[[Heads, Pages, KVWriteTargets], tuple[jax.Array, Pages]]
    attend: Callable[[jax.Array, PagedContext], Rows]
    attend_fresh: Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array, Segments], jax.Array | None] = _declined
    max_fresh_sequences: int = 0  # that `attend_fresh` takes
    prompt_in_codes: PromptInCodes | None = None
    norms: Norms = PLAIN_NORMS
    decode_norms: Norms = PLAIN_NORMS
    sampling: SamplingKernels = NO_SAMPLING_KERNELS
    adapter_product: AdapterProduct = add_products
    recurrent: RecurrentKernels = PLAIN_RECURRENT
    # Like `attend`, for heads so wide that a platform may have another kernel, or none.
    attend_latent: Callable[[jax.Array, PagedContext], jax.Array] = tiled_attention
    experts: ExpertKernels = NO_EXPERT_KERNELS
    products: ProductKernels = PLAIN_PRODUCTS
    moves: PageMoves = PLAIN_MOVES
    skips_padding: bool = False  # products do, where they are the platform's own


def step_attention(
    kernels: Kernels, spec: AttentionSpec, heads: Heads, pages: Pages, access: PageAccess
) -> tuple[Rows, Pages]:
    """[t, k, g, h] or rows with codes, and the pages with the keys and values of these tokens."""
    if spec.value_dim is not None:
        return _latent_attention(kernels, spec, heads, pages, access)
    targets, segments = access.targets, access.segments
    if kernels.prompt_in_codes is not None and segments is not None and len(segments.offsets) == 1:
        prompt = kernels.prompt_in_codes(spec, heads._replace(sinks=None), pages, targets)
        if prompt is not None:
            return prompt
    q, pages = kernels.place(heads._replace(sinks=None), pages, targets)
    if segments is not None and not spec.has_sinks:
        # Padding is zero: a weight of zero does not silence the NaN that its page may hold.
        real = (targets.pages > 0)[:, None, None]
        k, v = (jnp.where(real, array, 0) for array in read_tokens(pages, targets, q.dtype))
        if (out := kernels.attend_fresh(spec, q, k, v, segments)) is not None:
            return out, pages
    return kernels.attend(q, PagedContext(spec, pages, access.page_table, access.tiles, heads.sinks)), pages


def _latent_attention(
    kernels: Kernels, spec: AttentionSpec, heads: Heads, pages: Any, access: PageAccess
) -> tuple[jax.Array, Any]:
    """Attention over pages that hold keys alone."""
    (keys,), targets, qk = pages, access.targets, scaled(heads.qkv)
    q, k = qk[:, :, :-1], qk[:, :, -1]
    keys = put(keys, k, targets)
    out = kernels.attend_latent(q, PagedContext(spec, (keys, keys), access.page_table, access.tiles))
    return out[..., : spec.value_dim], (keys,)


def place(heads: Heads, pages: Pages, targets: KVWriteTargets) -> tuple[jax.Array, Pages]:
    """The queries, and the pages with keys and values written. Plain jnp."""
    q, k, v = heads.finished()
    q, k = spread_for_cache(q, k, pages[0].dtype)
    return q, written(pages, k, v, targets)


PLAIN = Kernels(place, tiled_attention)
