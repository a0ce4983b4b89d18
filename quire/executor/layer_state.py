"""The state that each kind of layer keeps between steps: shape, dtype, bytes, sharding and empty value.

Each kind of layer has an entry in `ARRAYS`. Some keep something of each position, in pages. The state of others belongs
to a slot and has one size, however long the sequence is: a slot's rows count from its sequence's first position on, so
they are not zeroed when a slot starts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from quire.layer_kind import ATTENTION
from quire.ops.attention.spec import AttentionSpec
from quire.ops.layer_spec import LayerSpec, LayerState
from quire.ops.native import library
from quire.ops.native.zeros import zeros as lazy_zeros
from quire.ops.pages import CodedPages, is_coded
from quire.ops.recurrence import RecurrentSpec
from quire.ops.sharding import PAGE_AXES, PAGE_SCALE_AXES, sharding
from quire.ops.slot_access import SlotAccess
from quire.reach import ChunkReach, Reach, in_tokens, in_words, most_read

# A page table per group is uploaded and read for every sequence, so there are few.
MAX_GROUPS = 8

# The pages of one layer: a pytree of arrays whose first axis is that of pages.
PageArrays = Any
# The state of one layer in all slots: a pytree of arrays [slots + 1, ...], whose last row is that of padding.
SlotArrays = Any


class LayerPlace(NamedTuple):
    """The pages of a layer are `arrays[array]`, found through the page table of `group`."""

    group: int
    array: int


class SlotPlace(NamedTuple):
    """The state of a layer is `slot_arrays[array]`, with a row for each slot."""

    array: int


@dataclass(frozen=True)
class PageLayout:
    """The division of layers into groups that share pages.

    A page is `page_size` positions of `len(specs)` layers. Layers are divided into groups of at most so many; all
    layers of a group reach the same positions. A page serves any group, so there is one pool of pages and no memory to
    divide between kinds of layers.
    """

    page_size: int
    dtype: Any
    mesh: Mesh | None
    groups: tuple[Reach, ...]  # the positions that the layers of each read
    places: tuple[LayerPlace | SlotPlace, ...]  # of each layer
    specs: tuple[LayerSpec, ...]  # of each page array, a layer that it serves
    slot_specs: tuple[LayerSpec, ...] = ()  # of each layer whose state belongs to a slot
    page_dtype: Any = None  # of keys and values; None: `dtype`

    def structure(self, num_pages: int) -> list[PageArrays]:
        """The shapes, dtypes and shardings of the page arrays."""
        return [ARRAYS[type(spec)](self, spec, num_pages) for spec in self.specs]

    def slot_structure(self, num_slots: int) -> list[SlotArrays]:
        """Those of the arrays of so many slots, and of one more for padding."""
        return [ARRAYS[type(spec)](self, spec, num_slots + 1) for spec in self.slot_specs]

    @property
    def is_lazy(self) -> bool:
        """True on one CPU: memory of the pages is taken when they are first written."""
        return self.mesh is None and jax.default_backend() == "cpu" and library.load()

    def empty(self, num_pages: int) -> list[PageArrays]:
        """Page arrays of zeros. Pages are not zeroed again: only positions that were written are ever read."""
        return self._zeros(self.structure(num_pages))

    def empty_slots(self, num_slots: int) -> list[SlotArrays]:
        return self._zeros(self.slot_structure(num_slots))

    def _zeros(self, structure: list[Any]) -> list[Any]:
        def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
            made: jax.Array = (
                lazy_zeros(like.shape, like.dtype)
                if self.is_lazy
                else jnp.zeros(like.shape, like.dtype, device=like.sharding)
            )
            return made

        return [jax.tree.map(zeros, arrays) for arrays in structure]

    @property
    def whole_page_bytes(self) -> int:
        """Bytes of one page on all devices together."""
        return sum(prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(self.structure(1)))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device."""
        return _bytes_of_one_device(self.structure(1))

    @property
    def page_numbers(self) -> int:
        """Numbers of one page on one device, in the array that has most of them."""
        return max((prod(_shape_on_one(array)) for array in jax.tree.leaves(self.structure(1))), default=0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state of one slot on one device, beside its pages."""
        return _bytes_of_one_device(self.slot_structure(0))

    @property
    def kinds(self) -> list[tuple[str, int, int, str]]:
        """For each kind of layer its name, number, bytes on one device, and the unit that has these bytes."""
        entries = []
        paged = [place for place in self.places if isinstance(place, LayerPlace)]
        for reach in sorted(set(self.groups), key=_size):
            arrays = [place.array for place in paged if self.groups[place.group] == reach]
            structure = self.structure(1)
            num_bytes = _bytes_of_one_device([structure[array] for array in arrays]) // self.page_size
            kind = self.specs[arrays[0]].kind
            full = "full attention" if kind is ATTENTION else kind.name
            name = full if reach is None else f"{kind.name} over {in_tokens(reach)}"
            entries.append((name, len(arrays), num_bytes, "token"))
        for kind in dict.fromkeys(spec.kind for spec in self.slot_specs):
            specs = [spec for spec in self.slot_specs if spec.kind == kind]
            num_bytes = _bytes_of_one_device([ARRAYS[type(spec)](self, spec, 1) for spec in specs])
            entries.append((kind.name, len(specs), num_bytes, "sequence"))
        return entries

    @property
    def rules(self) -> str:
        """The positions that the layers keep, in words."""
        layers = Counter(self.groups[place.group] for place in self.places if isinstance(place, LayerPlace))
        return ", ".join(
            f"{in_words(reach)}: {count} layer{'s' * (count > 1)}"
            for reach, count in sorted(layers.items(), key=lambda entry: _size(entry[0]))
        )

    def array(self, shape: tuple[int, ...], axes: Sequence[str | None], dtype: Any = None) -> jax.ShapeDtypeStruct:
        where = None if self.mesh is None else sharding(shape, axes, self.mesh)
        dtype = self.dtype if dtype is None else dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)  # type: ignore[no-untyped-call]


def _bytes_of_one_device(structure: list[Any]) -> int:
    return sum(prod(_shape_on_one(array)) * array.dtype.itemsize for array in jax.tree.leaves(structure))


def _shape_on_one(array: Any) -> tuple[int, ...]:
    return tuple(array.shape if array.sharding is None else array.sharding.shard_shape(array.shape))


def _keys_and_values(layout: PageLayout, spec: AttentionSpec, num_pages: int) -> PageArrays:
    keys = layout.array((num_pages, layout.page_size, spec.kv_heads, spec.head_dim), PAGE_AXES, layout.page_dtype)
    if spec.value_dim is not None:
        return (keys,)
    if layout.page_dtype is None or not is_coded(layout.page_dtype):
        return keys, keys
    scales = layout.array((num_pages, spec.kv_heads, layout.page_size), PAGE_SCALE_AXES, jnp.bfloat16)
    return CodedPages(keys, keys, scales, scales)


def _inputs_and_matrices(layout: PageLayout, spec: RecurrentSpec, rows: int) -> SlotArrays:
    inputs = (rows, spec.taps - 1, spec.key_heads, spec.channels)
    matrices = (rows, spec.key_heads, spec.group, spec.key_dim, spec.value_dim)
    return (
        layout.array(inputs, (None, None, "kv_heads", None)),
        layout.array(matrices, (None, "kv_heads", None, None, None), jnp.float32),  # it adds up over all tokens
    )


# The shapes of a layer's arrays, given the number of pages, or of rows of slots.
ARRAYS: dict[type[LayerSpec], Callable[[PageLayout, Any, int], Any]] = {
    AttentionSpec: _keys_and_values,
    RecurrentSpec: _inputs_and_matrices,
}


def page_layout(
    layers: Sequence[LayerSpec],
    page_size: int,
    max_sequence_tokens: int,
    dtype: Any,
    mesh: Mesh | None = None,
    max_groups: int = MAX_GROUPS,
    page_dtype: Any = None,
) -> PageLayout:
    """The division of layers into groups with which a sequence of `max_sequence_tokens` takes the fewest bytes.

    A window or a chunk of at least `max_sequence_tokens` is none. Layers of different shapes are one group. At
    least one layer has pages.
    """
    paged = [spec for spec in layers if spec.kind.in_pages]
    layout = _paged_layout(paged, page_size, max_sequence_tokens, dtype, mesh, max_groups)
    slotted = [spec for spec in layers if not spec.kind.in_pages]
    pages, slots = iter(layout.places), iter(range(len(slotted)))
    places = [next(pages) if spec.kind.in_pages else SlotPlace(next(slots)) for spec in layers]
    page_dtype = None if page_dtype is None else jnp.dtype(page_dtype)
    return replace(layout, places=tuple(places), slot_specs=tuple(slotted), page_dtype=page_dtype)


def _paged_layout(
    layers: Sequence[LayerSpec], page_size: int, longest: int, dtype: Any, mesh: Mesh | None, max_groups: int
) -> PageLayout:
    reaches = [spec.reach(longest) for spec in layers]
    together = PageLayout(
        page_size,
        jnp.dtype(dtype),
        mesh,
        groups=(_reach_of_all(reaches),),
        places=tuple(LayerPlace(0, index) for index in range(len(layers))),
        specs=tuple(layers),
    )
    first, *others = together.structure(1)
    candidates = [together]
    if all(arrays == first for arrays in others):
        candidates += [_divided(together, reaches, size) for size in range(1, len(layers))]

    def cost(layout: PageLayout) -> tuple[int, int]:
        positions = sum(longest if reach is None else most_read(reach) for reach in layout.groups)
        return len(layout.specs) * positions, len(layout.groups)

    return min((layout for layout in candidates if len(layout.groups) <= max_groups), key=cost)


def _reach_of_all(reaches: Sequence[Reach]) -> Reach:
    """The positions that any of these layers reads: the longest window where all have one, otherwise all."""
    windows = [reach for reach in reaches if isinstance(reach, int)]
    if len(windows) == len(reaches):
        return max(windows)
    return reaches[0] if len(set(reaches)) == 1 else None


def _size(reach: Reach) -> tuple[int, bool]:
    """By which groups are ordered."""
    return (0 if reach is None else most_read(reach)), isinstance(reach, ChunkReach)


def _divided(together: PageLayout, reaches: Sequence[Reach], size: int) -> PageLayout:
    """Groups of at most `size` layers that reach the same positions."""
    places: dict[int, LayerPlace] = {}
    groups: list[Reach] = []
    for reach in sorted(set(reaches), key=_size):
        members = [layer for layer, its_reach in enumerate(reaches) if its_reach == reach]
        for index, layer in enumerate(members):
            places[layer] = LayerPlace(len(groups) + index // size, index % size)
        groups += [reach] * -(-len(members) // size)
    num_arrays = 1 + max(place.array for place in places.values())
    return replace(
        together,
        groups=tuple(groups),
        places=tuple(places[layer] for layer in range(len(reaches))),
        specs=together.specs[:num_arrays],
    )


@dataclass(frozen=True)
class PagedStates:
    """`LayerStates` over the arrays of a layout. `access` has an entry per group."""

    layout: PageLayout
    arrays: Sequence[PageArrays]
    access: Sequence[Any]
    slot_arrays: Sequence[SlotArrays] = ()
    slot_access: SlotAccess | None = None  # where there are slot arrays

    def get(self, layer: int) -> LayerState:
        place = self.layout.places[layer]
        if isinstance(place, LayerPlace):
            return LayerState(self.arrays[place.array], self.access[place.group])
        return LayerState(self.slot_arrays[place.array], self.slot_access)

    def put(self, layer: int, state: LayerState) -> "PagedStates":
        place = self.layout.places[layer]
        in_pages = isinstance(place, LayerPlace)
        arrays = list(self.arrays if in_pages else self.slot_arrays)
        arrays[place.array] = state.arrays
        return replace(self, arrays=arrays) if in_pages else replace(self, slot_arrays=arrays)
