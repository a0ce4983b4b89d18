"""Programs run on padding: whatever they write is in places that nothing reads."""

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from quire.executor.adapter_arrays import AdapterArrays
from quire.executor.draft.draft import pack_guesses
from quire.executor.fused_steps import FUSED_KINDS, fused_shape
from quire.executor.launch import NUM_FEATURES, Packer, num_sample_fields
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.table import Key
from quire.executor.slots import pack_forced, pack_starts
from quire.executor.snapshot_arrays import LOAD, SAVE
from quire.executor.step import State
from quire.models.model import Model
from quire.request import num_mask_words


class Operands(Protocol):
    """The arrays that programs take beside the state, and where they come from."""

    model: Model
    compiler: Compiler
    adapters: AdapterArrays
    has_draft: bool

    @property
    def weights(self) -> tuple[Any, ...]: ...


def run_on_padding(programs: Operands, program: Callable[..., Any], key: Key, state: State) -> State:
    """Run one of the programs. That of adapters replaces the first one by zeros."""
    shapes = programs.compiler.shapes
    if isinstance(key, StepShape) or key[0] in FUSED_KINDS:
        shape = key if isinstance(key, StepShape) else fused_shape(*key)
        after: State = program(programs.weights, state, Packer(shapes).padding(shape))[0]
        return after
    kind, size = key
    if kind in (SAVE, LOAD):  # `SnapshotArrays` runs them
        return state
    if kind == "start":
        return state._replace(slots=program(state.slots, pack_starts([], size, shapes)))
    if kind == "adapter":
        programs.adapters.rehearse(program)
        return state
    if kind == "force":
        return state._replace(slots=program(state.slots, pack_forced([], size, shapes)))
    if kind == "copy":
        return state._replace(pages=program(state.pages, np.zeros((size, 2), np.int32)))
    if kind in ("save", "split"):
        program(state.pages, np.zeros(size, np.int32))
        return state
    if kind in ("restore", "place"):
        contents = programs.compiler.empty(kind, size)
        return state._replace(pages=program(state.pages, np.zeros(size, np.int32), contents)[0])
    if kind == "guess" and programs.has_draft:
        drafted: State = program(programs.weights, state, pack_guesses([], [], size, shapes))
        return drafted
    if kind == "guess":
        return state._replace(slots=program(state.slots, np.full(size, shapes.num_slots, np.int32)))
    hidden = jnp.zeros((shapes.num_samples, programs.model.hidden_size), programs.compiler.dtype)
    masks = jnp.zeros((size, num_mask_words(programs.model.vocab_size)), jnp.uint32)
    packed = np.full(num_sample_fields(shapes.guesses > 0) * size + NUM_FEATURES, shapes.num_slots, np.int32)
    packed[size:] = 0
    return state._replace(slots=program(programs.compiler.head, state.slots, hidden, packed, masks)[0])
