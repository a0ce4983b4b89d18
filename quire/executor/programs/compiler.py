"""Makes programs: traced and compiled, or loaded from a store."""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quire.executor.draft.draft import Draft, guess_by_draft, num_packed
from quire.executor.draft.guesses import guess_by_lookup
from quire.executor.fused_steps import FUSED_KINDS, fused_shape, fused_step
from quire.executor.host.host_pages import gather_pages, scatter_blocks, scatter_pages, stacks_of
from quire.executor.host.pinned_blocks import PINNED_KINDS, blocks_like, split_pages
from quire.executor.launch import NUM_FEATURES, num_sample_fields, sizes
from quire.executor.layer_state import PageArrays, PageLayout, SlotArrays, page_layout
from quire.executor.programs.compiler_options import (
    FEW_ROWS,
    Options,
    cpu_options,
    is_untuned,
    step_options,
    timings_in,
)
from quire.executor.programs.ladder import TIMED_ROWS, StepShape
from quire.executor.programs.store import ProgramStore
from quire.executor.programs.table import Key
from quire.executor.shapes import Shapes
from quire.executor.slots import empty_slots, force_tokens, pack_forced, pack_starts, start_slots
from quire.executor.snapshot_arrays import LOAD, SAVE, copy_states
from quire.executor.step import (
    Compiled,
    DraftParts,
    SamplingWay,
    State,
    Weights,
    copy_pages,
    forward,
    head_weights,
    sample_next,
)
from quire.models.adapters import join, one_adapter, put, structure
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.ops.gpu.capability import this_gpu
from quire.ops.kernels import kernels_for
from quire.ops.sharding import put as put_on_devices
from quire.ops.weights.weight import weights_of
from quire.request import num_mask_words

log = logging.getLogger(__name__)

# Programs that take pages from their arrays, or put them there.
MOVES: dict[str, Any] = {"save": gather_pages, "split": split_pages, "restore": scatter_pages, "place": scatter_blocks}


class Compiler:
    """Makes the program of a key. Called from several threads."""

    def __init__(
        self,
        model: Model,
        weights: ParamTree,
        shapes: Shapes,
        mesh: Mesh | None,
        store: ProgramStore | None,
        draft: Draft | None = None,
    ) -> None:
        """`draft` makes the guesses, where there are any; without it they are looked up."""
        self._store = store
        self._mesh = mesh
        self.timings: Path | None = None  # the folder of what XLA timed, where other processes compile as well
        self._model, self.shapes = model, shapes
        self.set_weights(weights, draft)
        dtype = jax.tree.leaves(weights["norm"])[0].dtype  # never quantised
        kernels = kernels_for(jax.default_backend(), str(dtype), mesh, this_gpu(), shapes.fixed_order)
        self.dtype = dtype  # of activations
        self.layout = page_layout(
            model.layers,
            shapes.page_size,
            shapes.max_sequence_tokens,
            dtype,
            mesh,
            shapes.num_groups,
            shapes.page_dtype,
        )
        parts = None
        if draft is not None:
            its_layout = draft_layout(draft.model, shapes, dtype)
            parts = DraftParts(draft.model, its_layout, self.layout.groups.index(None))
        self._compiled = Compiled(model, kernels, shapes, self.layout, parts)
        self.whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        self._state = self._state_structure()
        self._placement = None if mesh is None else jax.tree.map(lambda array: array.sharding, self._state)
        # Tracing is Python's, and one thread's at a time: side by side, all would be traced before any is compiled.
        # Of the programs without timed products one waits at a time, so that the others, which take the longest,
        # begin early.
        self._tracing, self._untuned = Lock(), Lock()
        self._small_programs: dict[Key, Any] = {}

    def set_weights(self, weights: ParamTree, draft: Draft | None) -> None:
        """Replace the weights that programs are called with. To make programs, their structure is enough."""
        stacks = None  # of adapters: their structure, with arrays where a weight is in them
        if self.shapes.adapters.slots:
            weights, stacks = join(weights, structure(self._model, self.shapes.adapters, self._mesh))
        self.stacks, self.adapters = stacks, jax.tree.map(_like, stacks)
        draft_weights = None if draft is None else draft.weights
        # Flat, because every call walks its arguments.
        self.weights = (*jax.tree.leaves(weights), *jax.tree.leaves(draft_weights))
        self.head = tuple(jax.tree.leaves(head_weights(weights)))
        self._structure = jax.tree.structure(Weights(weights, draft_weights, self.adapters))
        self._head_structure = jax.tree.structure(head_weights(weights))
        matrices = weights_of((weights, draft_weights))
        self._has_codes = any(weight.has_codes for weight in matrices)
        self._times_codes = any(weight.gains_from_timings for weight in matrices)

    @property
    def weight_structure(self) -> tuple[Any, ...]:
        """The structure of weights and of the stacks of adapters, all that programs know of them but their places."""
        arrays = *self.weights, *jax.tree.leaves(self.adapters)
        return self._structure, *((array.shape, array.dtype) for array in arrays)

    def _state_structure(self) -> State:
        """Shapes and places of everything a step changes; the slots are whole on every device."""
        slots = jax.eval_shape(lambda: empty_slots(self.shapes))
        slots = jax.tree.map(lambda array: _array(array.shape, array.dtype, self.whole), slots)
        pages = [one for layout in self._layouts for one in layout.structure(self.shapes.num_pages)]
        return State(pages, slots, self.layout.slot_structure(self.shapes.num_slots))

    @property
    def _layouts(self) -> list[PageLayout]:
        """The page layouts of the model and of the draft."""
        draft = self._compiled.draft
        return [self.layout] if draft is None else [self.layout, draft.layout]

    def empty_state(self) -> State:
        slots = jax.tree.map(lambda array: put_on_devices(array, self.whole), empty_slots(self.shapes))
        if all(layout.is_lazy for layout in self._layouts):
            pages, slot_arrays = self._small(("pages", 0))()
        else:
            pages, slot_arrays = self._empty_arrays()
        return State(pages, slots, slot_arrays)

    def _empty_arrays(self) -> tuple[list[PageArrays], list[SlotArrays]]:
        """The state of layers before any token."""
        pages = [one for layout in self._layouts for one in layout.empty(self.shapes.num_pages)]
        return pages, self.layout.empty_slots(self.shapes.num_slots)

    def empty_snapshots(self) -> list[SlotArrays]:
        return self.layout.empty_slots(self.shapes.num_snapshots)

    def successor(self, number: jax.Array) -> jax.Array:
        """`number` + 1, computed by the device that has it."""
        following: jax.Array = (_successor if self._mesh is not None else self._small(("successor", 0)))(number)
        return following

    def _small(self, key: Key) -> Any:
        """A program of every start. Kept, it is there in a moment; the first one traced takes a tenth of a second."""
        if key not in self._small_programs:
            self._small_programs[key] = self.make(key)
        return self._small_programs[key]

    def make(self, key: Key) -> Any:
        """A program from the store, or compiled and stored."""
        begun_s = time.monotonic()
        name = self._name(key)
        store, compile = self._store, partial(self.compile, key)
        program, is_kept = (compile(), False) if store is None else store.make(name, compile)
        # With the time that others were traced in.
        log.debug("%s %s in %.2f s", "loaded" if is_kept else "compiled", key, time.monotonic() - begun_s)
        return program

    def is_kept(self, key: Key) -> bool:
        return self._store is not None and self._store.has(self._name(key))

    def _name(self, key: Key) -> str:
        count = [self.shapes.burst] if key[0] == "burst" else []
        parts = (str(int(part) if isinstance(part, bool) else part) for part in (*key, *count))
        return "-".join([self._compiled.kernels.attend.__module__, *parts])

    def compile(self, key: Key) -> Any:
        state, shapes = self._state, self._compiled.shapes
        if isinstance(key, StepShape):
            return self._compile_step(partial(forward, self._compiled, key), key, (self._placement, self.whole))
        kind, size = key
        if kind in FUSED_KINDS:
            step = fused_step(self._compiled, kind, size)
            return self._compile_step(step, fused_shape(kind, size), (self._placement, self.whole))
        if kind == "start":
            return self._compile_traced(start_slots, 0, self.whole, state.slots, pack_starts([], size, shapes))
        if kind == "force":
            return self._compile_traced(force_tokens, 0, self.whole, state.slots, pack_forced([], size, shapes))
        if kind == "pages":
            return self._compile_traced(self._empty_arrays, (), None)
        if kind == "successor":
            return self._compile_traced(_successor, (), None, _array((), jnp.int32))
        if kind == "adapter":
            return self._compile_adapter()
        if kind == "guess" and self._compiled.draft is not None:
            return self._compile_draft(size)
        if kind == "guess":
            guess = partial(guess_by_lookup, count=shapes.guesses)
            return self._compile_traced(guess, 0, self.whole, state.slots, _array((size,), jnp.int32))
        if kind == "copy":
            places = None if self._placement is None else self._placement.pages
            return self._compile_traced(copy_pages, 0, places, state.pages, _array((size, 2), jnp.int32))
        if kind in MOVES:
            return self._compile_move(kind, size)
        if kind in (SAVE, LOAD):
            return self._compile_states(kind, size)
        return self._compile_sample(cast(SamplingWay, kind), size)

    def _compile_states(self, kind: str, size: int) -> Any:
        """Copies states of slots to snapshots, or from them."""
        into, source = self.layout.slot_structure(self.shapes.num_snapshots), self._state.slot_arrays
        into, source = (into, source) if kind == SAVE else (source, into)
        places = jax.tree.map(lambda array: array.sharding, into)
        return self._compile_traced(copy_states, 0, places, into, source, _array((size, 2), jnp.int32))

    def _compile_move(self, kind: str, size: int) -> Any:
        pages, moved = self._state.pages, self._moved(kind, size)
        move = partial(MOVES[kind], self._compiled.kernels.moves, stacks_of(pages))
        inputs = pages, _array((size,), jnp.int32)
        if kind in ("save", "split"):
            return self._compile_traced(move, (), jax.tree.map(lambda one: one.sharding, moved), *inputs)
        places = None if self._placement is None else (self._placement.pages, self.whole)
        return self._compile_traced(move, 0, places, *inputs, moved)

    def _moved(self, kind: str, num_pages: int) -> list[Any]:
        """The structure of `num_pages` on their way to or from the host."""
        stacks = stacks_of(self._state.pages)
        if kind in PINNED_KINDS:
            return blocks_like(stacks, num_pages)
        return [stack.like(num_pages) for stack in stacks]

    def empty(self, kind: str, num_pages: int) -> list[Any]:
        """Pages without contents, as programs of this kind take them."""
        pages = self._moved(kind, num_pages)
        if kind in PINNED_KINDS:  # blocks that are alike: one is enough
            return self._zeros(pages[:1]) * len(pages)
        return self._zeros(pages)

    @staticmethod
    def _zeros(pages: list[Any]) -> list[Any]:
        made: list[Any] = jax.tree.map(lambda one: put_on_devices(np.zeros(one.shape, one.dtype), one.sharding), pages)
        return made

    @property
    def moved_page_bytes(self) -> int:
        """Bytes of a page on its way to or from the host."""
        return sum(stack.num_bytes for stack in stacks_of(self._state.pages))

    @property
    def pages(self) -> list[Any]:
        """The structure of the page arrays."""
        return self._state.pages

    def _compile_sample(self, way: SamplingWay, size: int) -> Any:
        model, kernels, shapes, _, _ = self._compiled

        def sample(head: tuple[jax.Array, ...], slots: Any, hidden: Any, packed: Any, masks: Any) -> Any:
            tree = jax.tree.unflatten(self._head_structure, head)
            how = kernels.sampling, shapes.fixed_order
            return sample_next(way, model, size, tree, slots, hidden, packed, masks, *how)

        hidden = _array((shapes.num_samples, model.hidden_size), self.dtype, self.whole)
        packed = _array((num_sample_fields(shapes.guesses > 0) * size + NUM_FEATURES,), jnp.int32)
        masks = _array((size, num_mask_words(model.vocab_size)), jnp.uint32, self.whole)
        inputs = (self.head, self._state.slots, hidden, packed, masks)
        # Timing its product would disturb that of decodes, which are compiled meanwhile.
        options = self._options(StepShape(size))
        return self._compile_traced(sample, 1, self.whole, *inputs, options=options)

    def _compile_adapter(self) -> Any:
        """Puts an adapter into its slot, where the others stay."""
        assert self.adapters is not None
        places = None if self._mesh is None else [one.sharding for one in jax.tree.leaves(self.adapters)]
        stacks, adapter = (jax.tree.flatten(tree) for tree in (self.adapters, one_adapter(self.adapters)))

        def put_flat(flat: list[Any], slot: jax.Array, new: list[Any]) -> list[Any]:
            return jax.tree.leaves(put(jax.tree.unflatten(stacks[1], flat), slot, jax.tree.unflatten(adapter[1], new)))

        return self._compile_traced(put_flat, 0, places, stacks[0], _array((), jnp.int32), adapter[0])

    def _compile_step(self, step: Callable[..., Any], shape: StepShape, places: Any) -> Any:
        return self._compile_packed(step, sum(sizes(shape, self.shapes)), places, self._options(shape))

    def times_decodes(self, rows: int) -> bool:
        """True if XLA chooses the products of so many decodes by timing them."""
        gains = rows <= TIMED_ROWS or self._times_codes or self._mesh is not None
        return jax.default_backend() == "gpu" and gains and not self.shapes.fixed_order

    def times_few(self, rows: int) -> bool:
        """True if XLA times the products of so few rows in any program: it alone widens codes inside them."""
        return jax.default_backend() == "gpu" and self._has_codes and rows <= FEW_ROWS

    def _options(self, shape: StepShape) -> Options:
        """Options of the compiler, for products of this many rows."""
        if jax.default_backend() != "gpu" or self.times_few(shape.tokens):
            return {}
        return step_options(shape.tokens, is_timed=shape.decodes_only and self.times_decodes(shape.tokens))

    def _compile_draft(self, size: int) -> Any:
        guess = partial(guess_by_draft, self._compiled, size)
        options = self._options(StepShape(size, decodes_only=True))
        return self._compile_packed(guess, num_packed(size, self.shapes.num_groups), self._placement, options)

    def _compile_packed(self, step: Callable[..., Any], num_integers: int, places: Any, options: Options) -> Any:
        def with_flat_weights(weights: tuple[jax.Array, ...], state: State, packed: jax.Array) -> Any:
            return step(jax.tree.unflatten(self._structure, weights), state, packed)

        packed = _array((num_integers,), jnp.int32)
        inputs = ((*self.weights, *jax.tree.leaves(self.adapters)), self._state, packed)
        return self._compile_traced(with_flat_weights, 1, places, *inputs, options=options)

    def _compile_traced(
        self,
        function: Callable[..., Any],
        donated: int | tuple[()],
        places: Any,
        *inputs: Any,
        options: Options | None = None,
    ) -> Any:
        where = {"out_shardings": places} if self._mesh is not None else {}
        with self._untuned if is_untuned(options) else nullcontext(), self._tracing:
            lowered = jax.jit(function, donate_argnums=donated, **where).lower(*inputs)
        usual = cpu_options() if jax.default_backend() == "cpu" else {}
        timed = {} if self.timings is None or is_untuned(options) else timings_in(self.timings)
        return lowered.compile({**usual, **timed, **(options or {})})


def draft_layout(model: Model, shapes: Shapes, dtype: Any) -> PageLayout:
    """All layers in one group: they keep the positions of the pages that they share."""
    how: Any = {"max_groups": 1, "page_dtype": shapes.page_dtype}
    return page_layout(model.layers, shapes.page_size, shapes.max_sequence_tokens, dtype, **how)


@jax.jit
def _successor(number: jax.Array) -> jax.Array:
    return number + 1


def _like(array: Any) -> jax.ShapeDtypeStruct:
    where = None if isinstance(array, jax.Array) else array.sharding  # those with weights are on one device
    return _array(array.shape, array.dtype, where)


def _array(shape: tuple[int, ...], dtype: Any, where: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)  # type: ignore[no-untyped-call]
