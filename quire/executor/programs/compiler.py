"""Makes programs: traced and compiled, or loaded from a store."""

import logging
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quire.executor.draft.draft import Draft
from quire.executor.layer_state import PageLayout, SlotArrays, page_layout
from quire.executor.programs.compiler_options import (
    FEW_ROWS,
    Options,
    cpu_options,
    is_untuned,
    step_options,
    timings_in,
)
from quire.executor.programs.kinds import (
    Key,
    Materials,
    Operand,
    ProgramKind,
    argument_of,
    array_like,
    kind_of,
    page_layouts,
    shape_of,
)
from quire.executor.programs.ladder import TIMED_ROWS, StepShape
from quire.executor.programs.store import ProgramStore
from quire.executor.shapes import Shapes
from quire.executor.slots import empty_slots
from quire.executor.step import Compiled, DraftParts, State, Weights, head_weights
from quire.models.adapters import join, structure
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.ops.gpu.capability import this_gpu
from quire.ops.kernels import kernels_for
from quire.ops.sharding import put as put_on_devices
from quire.ops.weights.weight import weights_of

log = logging.getLogger(__name__)


class Compiler:
    """Makes the program of a key. Called from several threads."""

    def __init__(
        self,
        model: Model,
        weights: ParamTree,
        shapes: Shapes,
        mesh: Mesh | None = None,
        store: ProgramStore | None = None,
        draft: Draft | None = None,
    ) -> None:
        """`draft` makes the guesses, where there are any; without it they are looked up."""
        self._store = store
        self._mesh = mesh
        self.timings: Path | None = None  # the folder of what XLA timed, where other processes compile as well
        self.model, self.shapes = model, shapes
        self.has_draft = draft is not None
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
        # Tracing is Python's, and one thread's at a time: side by side, all would be traced before any is compiled.
        # Of the programs without timed products one waits at a time, so that the others, which take the longest,
        # begin early.
        self._tracing, self._untuned = Lock(), Lock()
        self._small_programs: dict[Key, Any] = {}

    def set_weights(self, weights: ParamTree, draft: Draft | None) -> None:
        """Replace the weights that programs are called with. To make programs, their structure is enough."""
        stacks = None  # of adapters: their structure, with arrays where a weight is in them
        if self.shapes.adapters.slots:
            weights, stacks = join(weights, structure(self.model, self.shapes.adapters, self._mesh))
        self.stacks, self.adapters = stacks, jax.tree.map(_like, stacks)
        draft_weights = None if draft is None else draft.weights
        # Flat, because every call walks its arguments.
        self.weights = (*jax.tree.leaves(weights), *jax.tree.leaves(draft_weights))
        self.head = tuple(jax.tree.leaves(head_weights(weights)))
        whole = Weights(weights, draft_weights, self.adapters)
        self._trees = {
            Operand.WEIGHTS: jax.tree.structure(whole),
            Operand.HEAD: jax.tree.structure(head_weights(weights)),
        }
        matrices = weights_of((weights, draft_weights))
        self._has_codes = any(weight.has_codes for weight in matrices)
        self._times_codes = any(weight.gains_from_timings for weight in matrices)

    @property
    def weight_structure(self) -> tuple[Any, ...]:
        """The structure of weights and of the stacks of adapters, all that programs know of them but their places."""
        arrays = *self.weights, *jax.tree.leaves(self.adapters)
        return self._trees[Operand.WEIGHTS], *((array.shape, array.dtype) for array in arrays)

    def _state_structure(self) -> State:
        """Shapes and places of everything a step changes; the slots are whole on every device."""
        shapes = self.shapes
        slots = jax.eval_shape(lambda: empty_slots(shapes))
        slots = jax.tree.map(lambda array: array_like(array.shape, array.dtype, self.whole), slots)
        pages = [one for layout in page_layouts(self._compiled) for one in layout.structure(shapes.num_pages)]
        return State(pages, slots, self.layout.slot_structure(shapes.num_slots))

    @property
    def materials(self) -> Materials:
        return Materials(self._compiled, self.dtype, self.whole, self._state, self.adapters)

    def empty_state(self) -> State:
        slots = jax.tree.map(lambda array: put_on_devices(array, self.whole), empty_slots(self.shapes))
        is_lazy = all(layout.is_lazy for layout in page_layouts(self._compiled))
        pages, slot_arrays = (self._small(("pages", 0)) if is_lazy else self.materials.empty_layers)()
        return State(pages, slots, slot_arrays)

    def empty_snapshots(self) -> list[SlotArrays]:
        return self.layout.empty_slots(self.shapes.num_snapshots)

    def no_hidden(self) -> jax.Array:
        """Zeros in place of the vectors of a forward pass."""
        like = self._structure_of(Operand.HIDDEN)
        return put_on_devices(np.zeros(like.shape, like.dtype), like.sharding)

    def successor(self, number: jax.Array) -> jax.Array:
        """`number` + 1, computed by the device that has it."""
        following: jax.Array = (_successor if self._mesh is not None else self._small(("successor", 0)))(number)
        return following

    def _small(self, key: Key) -> Any:
        """A program of every start. Kept, it is there in a moment; the first one traced takes a tenth of a second."""
        if key not in self._small_programs:
            self._small_programs[key] = self.make(key)
        return self._small_programs[key]

    def share_timings(self) -> None:
        """Read and write what XLA timed where other processes that compile do."""
        self.timings = None if self._store is None else self._store.shared_timings()

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
        count = [self.shapes.burst] if kind_of(key).repeats else []
        parts = (str(int(part) if isinstance(part, bool) else part) for part in (*key, *count))
        return "-".join([self._compiled.kernels.attend.__module__, *parts])

    def compile(self, key: Key) -> Any:
        kind, size, materials = kind_of(key), argument_of(key), self.materials
        function, trees = kind.function(materials, size), [self._trees.get(part) for part in kind.takes]

        def program(*arguments: Any) -> Any:
            parts = zip(trees, arguments, strict=False)
            whole = (part if tree is None else jax.tree.unflatten(tree, part) for tree, part in parts)
            return function(*whole, *arguments[len(trees) :])

        program.__name__ = kind.name
        inputs = *map(self._structure_of, kind.takes), *kind.inputs(materials, size)
        donated = () if kind.replaces is None else kind.takes.index(kind.replaces)
        places: Any = {}
        if self._mesh is not None:
            places = {"out_shardings": self._places(kind, size)}
        options = self._options(shape_of(key))
        with self._untuned if is_untuned(options) else nullcontext(), self._tracing:
            lowered = jax.jit(program, donate_argnums=donated, **places).lower(*inputs)
        usual = cpu_options() if jax.default_backend() == "cpu" else {}
        timed = {} if self.timings is None or is_untuned(options) else timings_in(self.timings)
        return lowered.compile({**usual, **timed, **options})

    def _structure_of(self, part: Operand) -> Any:
        if part is Operand.STATE:
            return self._state
        if part is Operand.WEIGHTS:
            return (*self.weights, *jax.tree.leaves(self.adapters))
        if part is Operand.HEAD:
            return self.head
        if part is Operand.HIDDEN:
            return array_like((self.shapes.num_samples, self._compiled.model.hidden_size), self.dtype, self.whole)
        if part is Operand.SNAPSHOTS:
            return self.layout.slot_structure(self.shapes.num_snapshots)
        if part is Operand.ADAPTERS:
            return jax.tree.leaves(self.adapters)
        return getattr(self._state, part.value)

    def _places(self, kind: ProgramKind, size: Any) -> Any:
        """The shardings of a program's results. None leaves them to the compiler."""
        if kind.replaces is None:
            return None if kind.result_places is None else kind.result_places(self.materials, size)
        replaced = jax.tree.map(lambda array: array.sharding, self._structure_of(kind.replaces))
        return (replaced, self.whole) if kind.has_results else replaced

    @property
    def moved_page_bytes(self) -> int:
        """Bytes of a page on its way to or from the host."""
        return sum(stack.num_bytes for stack in self.materials.stacks)

    @property
    def pages(self) -> list[Any]:
        """The structure of the page arrays."""
        return self._state.pages

    def times_decodes(self, rows: int) -> bool:
        """True if XLA chooses the products of so many decodes by timing them."""
        gains = rows <= TIMED_ROWS or self._times_codes or self._mesh is not None
        return jax.default_backend() == "gpu" and gains and not self.shapes.fixed_order

    def times_few(self, rows: int) -> bool:
        """True if XLA times the products of so few rows in any program: it alone widens codes inside them."""
        return jax.default_backend() == "gpu" and self._has_codes and rows <= FEW_ROWS

    def _options(self, shape: StepShape | None) -> Options:
        """Options of the compiler, for the products of a program."""
        if shape is None or jax.default_backend() != "gpu" or self.times_few(shape.tokens):
            return {}
        return step_options(shape.tokens, is_timed=shape.decodes_only and self.times_decodes(shape.tokens))


def draft_layout(model: Model, shapes: Shapes, dtype: Any) -> PageLayout:
    """All layers in one group: they keep the positions of the pages that they share."""
    how: Any = {"max_groups": 1, "page_dtype": shapes.page_dtype}
    return page_layout(model.layers, shapes.page_size, shapes.max_sequence_tokens, dtype, **how)


@jax.jit
def _successor(number: jax.Array) -> jax.Array:
    return number + 1


def _like(array: Any) -> jax.ShapeDtypeStruct:
    where = None if isinstance(array, jax.Array) else array.sharding  # those with weights are on one device
    return array_like(array.shape, array.dtype, where)
