"""The state that each kind of layer keeps between steps: shape, dtype, bytes, sharding and empty value.

`STATES` has one entry per kind of layer. Paged keys and values are the only kind now. Latent attention would be an
entry with one array per token in place of two; a recurrent layer, whose state belongs to a slot and not to pages,
would be an entry for arrays indexed by slot that are zeroed when a slot starts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from quire.models.model import LayerSpec
from quire.ops.attention_spec import AttentionSpec
from quire.ops.native import library
from quire.ops.native.zeros import zeros as lazy_zeros
from quire.sharding import PAGE_AXES, sharding

# A page table per group is uploaded and read for every sequence, so there are few.
MAX_GROUPS = 8

# The pages of one layer: a pytree of arrays whose first two axes are [num_pages, page_size].
PageArrays = Any


class LayerPlace(NamedTuple):
    """The pages of a layer are `arrays[array]`, found through the page table of `group`."""

    group: int
    array: int


@dataclass(frozen=True)
class PageLayout:
    """The division of layers into groups that share pages.

    A page is `page_size` positions of `len(specs)` layers. Layers are divided into groups of at most so many; all
    layers of a group need the same positions: all, or the last `window`. A page serves any group, so there is one pool
    of pages and no memory to divide between kinds of layers.
    """

    page_size: int
    dtype: Any
    mesh: Mesh | None
    windows: tuple[int | None, ...]  # of each group; None: all positions
    places: tuple[LayerPlace, ...]  # of each layer
    specs: tuple[LayerSpec, ...]  # of each page array, a layer that it serves

    def structure(self, num_pages: int) -> list[PageArrays]:
        """The shapes, dtypes and shardings of the page arrays."""
        return [STATES[type(spec)](self, spec, num_pages) for spec in self.specs]

    @property
    def is_lazy(self) -> bool:
        """True on one CPU: memory of the pages is taken when they are first written."""
        return self.mesh is None and jax.default_backend() == "cpu" and library.load()

    def empty(self, num_pages: int) -> list[PageArrays]:
        """Page arrays of zeros. Pages are not zeroed again: only positions that were written are ever read."""

        def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
            made: jax.Array = (
                lazy_zeros(like.shape, like.dtype)
                if self.is_lazy
                else jnp.zeros(like.shape, like.dtype, device=like.sharding)
            )
            return made

        return [jax.tree.map(zeros, arrays) for arrays in self.structure(num_pages)]

    @property
    def whole_page_bytes(self) -> int:
        """Bytes of one page on all devices together."""
        return sum(prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(self.structure(1)))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device."""
        return sum(
            prod(a.shape if a.sharding is None else a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
            for a in jax.tree.leaves(self.structure(1))
        )

    @property
    def rules(self) -> str:
        """The positions that the layers keep, in words."""
        layers = Counter(self.windows[place.group] for place in self.places)
        return ", ".join(
            f"{'full' if window is None else f'window {window}'}: {count} layer{'s' * (count > 1)}"
            for window, count in sorted(layers.items(), key=lambda entry: entry[0] or 0)
        )

    def array(self, shape: tuple[int, ...], axes: Sequence[str | None]) -> jax.ShapeDtypeStruct:
        where = None if self.mesh is None else sharding(shape, axes, self.mesh)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=where)  # type: ignore[no-untyped-call]


def _keys_and_values(layout: PageLayout, spec: AttentionSpec, num_pages: int) -> PageArrays:
    keys = layout.array((num_pages, layout.page_size, spec.kv_heads, spec.head_dim), PAGE_AXES)
    return keys, keys


STATES: dict[type, Callable[[PageLayout, Any, int], PageArrays]] = {AttentionSpec: _keys_and_values}


def page_layout(
    layers: Sequence[LayerSpec],
    page_size: int,
    max_sequence_tokens: int,
    dtype: Any,
    mesh: Mesh | None = None,
    max_groups: int = MAX_GROUPS,
) -> PageLayout:
    """The division of layers into groups with which a sequence of `max_sequence_tokens` takes the fewest bytes.

    A window of at least `max_sequence_tokens` is none. Layers of different shapes are one group.
    """
    longest = max_sequence_tokens
    windows = [None if spec.window is None or spec.window >= longest else max(spec.window, 2) for spec in layers]
    together = PageLayout(
        page_size,
        jnp.dtype(dtype),
        mesh,
        windows=(None if None in windows else max(filter(None, windows)),),
        places=tuple(LayerPlace(0, index) for index in range(len(layers))),
        specs=tuple(layers),
    )
    first, *others = together.structure(1)
    candidates = [together]
    if all(arrays == first for arrays in others):
        candidates += [_divided(together, windows, size) for size in range(1, len(layers))]

    def cost(layout: PageLayout) -> tuple[int, int]:
        positions = sum(longest if window is None else window for window in layout.windows)
        return len(layout.specs) * positions, len(layout.windows)

    return min((layout for layout in candidates if len(layout.windows) <= max_groups), key=cost)


def _divided(together: PageLayout, windows: Sequence[int | None], size: int) -> PageLayout:
    """Groups of at most `size` layers with the same window."""
    places: dict[int, LayerPlace] = {}
    groups: list[int | None] = []
    for window in sorted(set(windows), key=lambda window: window or 0):
        members = [layer for layer, its_window in enumerate(windows) if its_window == window]
        for index, layer in enumerate(members):
            places[layer] = LayerPlace(len(groups) + index // size, index % size)
        groups += [window] * -(-len(members) // size)
    num_arrays = 1 + max(place.array for place in places.values())
    return replace(
        together,
        windows=tuple(groups),
        places=tuple(places[layer] for layer in range(len(windows))),
        specs=together.specs[:num_arrays],
    )


class PagedState(NamedTuple):
    """The state of a layer during a step: its pages, and what its group's page tables say about the step's tokens."""

    pages: PageArrays
    access: Any


@dataclass(frozen=True)
class PagedStates:
    """`LayerStates` over the page arrays of a layout. `access` has an entry per group."""

    layout: PageLayout
    arrays: Sequence[PageArrays]
    access: Sequence[Any]

    def get(self, layer: int) -> PagedState:
        group, array = self.layout.places[layer]
        return PagedState(self.arrays[array], self.access[group])

    def put(self, layer: int, state: PagedState) -> "PagedStates":
        arrays = list(self.arrays)
        arrays[self.layout.places[layer].array] = state.pages
        return replace(self, arrays=arrays)
