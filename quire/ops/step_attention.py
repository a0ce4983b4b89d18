"""Attention over the tokens of one launch: decodes, one token each, then groups of prefill tokens."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.attention_spec import AttentionSpec
from quire.ops.grouped_attention import Groups, grouped_attention
from quire.ops.heads import Heads
from quire.ops.native import grouped_attention as native
from quire.ops.native import library
from quire.ops.native.norms import NATIVE as NATIVE_NORMS
from quire.ops.native.place_heads import place_heads
from quire.ops.norms import PLAIN as PLAIN_NORMS
from quire.ops.norms import Norms

log = logging.getLogger(__name__)

Pages = tuple[jax.Array, jax.Array]  # keys and values of a layer, [num_pages, page_size, k, h] each
# Of logits, top_k, top_p, min_p and typical_p: the logits again, and the cut, centre and spread of what they leave.
FilterCuts = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array, jax.Array]
]


class Places(NamedTuple):
    """Where the tokens of a launch stand, and where their keys and values go."""

    pages: jax.Array  # [t]; page 0 for padding
    offsets: jax.Array  # [t], within the page
    rows: Groups  # the first tokens, each a group of its own
    fills: Groups  # the rest, in groups of one size


class Segments(NamedTuple):
    """Where sequences begin among the tokens of a launch, and how many tokens of each there are, [m]; -1 for none."""

    offsets: jax.Array
    lengths: jax.Array

    @classmethod
    def of(cls, starts: jax.Array, lengths: jax.Array, group_size: int, most: int) -> "Segments":
        """Of groups with these starts and lengths, each sequence's from its first token on, and at most so many."""
        begins = (starts == 0) & (lengths > 0)
        (first,) = jnp.nonzero(begins, size=most, fill_value=-1)
        numbers = jnp.where(lengths > 0, jnp.cumsum(begins) - 1, most)
        lengths = jnp.zeros(most + 1, jnp.int32).at[numbers].add(lengths)[:most]
        return cls(jnp.where(first < 0, -1, first * group_size).astype(jnp.int32), jnp.where(first < 0, -1, lengths))


class Kernels(NamedTuple):
    """How a device does it: `place` finishes the heads and writes keys and values, `attend` reads them.

    `attend_alone` is for the tokens of a few sequences from their first on, [t, k, g, h], with keys and values
    [t, k, h]; it may decline, and give anything for padding. `decode_norms` are the norms of steps without prefills,
    `filter_cuts` is for sampling, where XLA alone takes too long.
    """

    place: Callable[[Heads, Pages, Places], tuple[jax.Array, Pages]]
    attend: Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array, Groups], jax.Array]
    attend_alone: Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array, Segments], jax.Array | None] = lambda *_: (
        None
    )
    most_alone: int = 0  # sequences that `attend_alone` can be given
    norms: Norms = PLAIN_NORMS
    decode_norms: Norms = PLAIN_NORMS
    filter_cuts: FilterCuts | None = None


def step_attention(
    kernels: Kernels, spec: AttentionSpec, heads: Heads, state: Pages, places: Places, alone: int = 0
) -> tuple[jax.Array, Pages]:
    """[t, k, g, h], and the pages with the keys and values of these tokens in them.

    `alone` says that the tokens are those of so many sequences at most, from the first on.
    """
    q, state = kernels.place(heads, state, places)
    if alone:
        # Padding is zero: a weight of zero does not silence what its page may hold.
        real = (places.pages > 0)[:, None, None]
        k, v = (jnp.where(real, pages[places.pages, places.offsets], 0) for pages in state)
        fills = places.fills
        segments = Segments.of(fills.starts, fills.lengths, len(q) // len(fills.starts), alone)
        if (out := kernels.attend_alone(spec, q, k, v, segments)) is not None:
            return out, state
    rows, groups = len(places.rows.starts), len(places.fills.starts)
    parts = []
    if rows:
        parts.append(kernels.attend(spec, q[:rows, None], *state, places.rows)[:, 0])
    if groups:
        grouped = q[rows:].reshape(groups, -1, *q.shape[1:])
        parts.append(kernels.attend(spec, grouped, *state, places.fills).reshape(-1, *q.shape[1:]))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0], state


def place(heads: Heads, state: Pages, places: Places) -> tuple[jax.Array, Pages]:
    """The queries, and the pages with keys and values written. Plain jnp."""
    q, k, v = heads.finished()
    k_pages = state[0].at[places.pages, places.offsets].set(k.astype(state[0].dtype))
    v_pages = state[1].at[places.pages, places.offsets].set(v.astype(state[1].dtype))
    return q, (k_pages, v_pages)


def native_place(heads: Heads, state: Pages, places: Places) -> tuple[jax.Array, Pages]:
    """The same by the C++ kernels."""
    heads = heads.with_norms_done(NATIVE_NORMS.rms)
    none = jnp.zeros((len(heads.qkv), 0), heads.qkv.dtype)
    cos, sin = (none, none) if heads.rotation is None else heads.rotation
    q, *pages = place_heads(heads.qkv, cos, sin, places.pages, places.offsets, *state)
    return q, (pages[0], pages[1])


PLAIN = Kernels(place, grouped_attention)
NATIVE = Kernels(native_place, native.grouped_attention, norms=NATIVE_NORMS, decode_norms=NATIVE_NORMS)


def kernels_for(platform: str, dtype: str, num_devices: int) -> Kernels:
    """What steps use on a platform as JAX names it.

    Kernels are for one device: the compiler does not know how to cut them across several.
    """
    if num_devices > 1:
        return PLAIN
    if platform == "cpu" and dtype == "float32" and library.load():
        return NATIVE
    if platform == "gpu":
        try:
            from quire.ops.gpu.kernels import GPU
        except ImportError as error:
            log.warning("this JAX has no Pallas for Triton, XLA runs in its place, which is slower: %s", error)
        else:
            return GPU
    return PLAIN
