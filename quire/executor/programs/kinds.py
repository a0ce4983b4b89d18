"""The kinds of programs: a record for each says all that differs between them.

What makes programs, keeps them, runs them on padding, replays them on the followers of a group, orders them or tells of
them reads these records. A new kind is a record here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from quire.executor.draft.draft import guess_by_draft, pack_guesses
from quire.executor.draft.guesses import guess_by_lookup
from quire.executor.host.stacks import (
    Stack,
    blocks_like,
    gather_pages,
    scatter_blocks,
    scatter_pages,
    split_pages,
    stacks_of,
)
from quire.executor.launch import NUM_FEATURES, num_sample_fields, padding
from quire.executor.layer_state import PageArrays, PageLayout, SlotArrays
from quire.executor.programs.ladder import StepShape
from quire.executor.slots import force_tokens, pack_forced, pack_starts, start_slots
from quire.executor.snapshot_arrays import copy_states
from quire.executor.step import Compiled, SamplingWay, State, copy_pages, decode, forward, sample_next, verify
from quire.models.adapters import one_adapter, put
from quire.ops.sharding import put as put_on_devices
from quire.request import num_mask_words

# A forward pass by its shape; all others by their kind and a size: rows, or tokens, slots or pages.
Key = StepShape | tuple[str, int]

# Tokens that a program saves which does the work of several: starting one takes as long as 32 tokens, and four of five
# steps are of decodes alone.
ONE_PROGRAM = 4 * 32.0
WAYS: tuple[SamplingWay, ...] = get_args(SamplingWay)


class Operand(Enum):
    """An array, or a tree of them, that each process that runs a program has of its own. Those of `State` have its
    names."""

    STATE = "state"
    PAGES = "pages"
    SLOTS = "slots"
    SLOT_ARRAYS = "slot_arrays"
    WEIGHTS = "weights"  # the model's, the draft's and the adapters', flat
    HEAD = "head"  # the weights outside the layers, flat
    HIDDEN = "hidden"  # vectors of a forward pass
    SNAPSHOTS = "snapshots"
    ADAPTERS = "adapters"  # flat


def page_layouts(compiled: Compiled) -> list[PageLayout]:
    """Those of the model and of the draft."""
    return [compiled.layout] if compiled.draft is None else [compiled.layout, compiled.draft.layout]


class Materials(NamedTuple):
    """The constants of programs, and the structure of the arrays that they take."""

    compiled: Compiled
    dtype: Any  # of activations
    whole: NamedSharding | None  # of arrays that every device has whole; None on one device
    state: State
    adapters: Any = None  # the stacks of adapters, if there are any

    @property
    def stacks(self) -> list[Stack]:
        return stacks_of(self.state.pages)

    def empty_layers(self) -> tuple[list[PageArrays], list[SlotArrays]]:
        """The state of layers before any token."""
        compiled, shapes = self.compiled, self.compiled.shapes
        pages = [one for layout in page_layouts(compiled) for one in layout.empty(shapes.num_pages)]
        return pages, compiled.layout.empty_slots(shapes.num_slots)


Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class ProgramKind:
    """Called with its operands, then with its inputs. The operand that it replaces is donated, and its first result is
    the new one."""

    name: str
    purpose: str
    function: Callable[[Materials, Any], Callable[..., Any]]  # of the size, or of the shape of a forward pass
    inputs: Callable[[Materials, Any], Inputs] = lambda materials, size: ()  # of padding; structures stand for zeros
    takes: tuple[Operand, ...] = ()
    replaces: Operand | None = None
    has_results: bool = False  # beside what it replaces
    result_places: Callable[[Materials, Any], Any] | None = None  # where it replaces nothing; else they are whole
    shape: Callable[[Any], StepShape] | None = None  # of the rows that are multiplied with weights
    times_decodes: bool = False  # XLA times the products of so many decodes for this kind, and others wait for it
    repeats: bool = False  # does a burst of decodes, whose number its name in the store has
    gives_hidden: bool = False  # its result has the vectors that are sampled from
    is_checked: bool = False  # where rows are to have the same bits in all programs
    counts: str = "tokens"  # what its size counts
    # For the score by which programs are made. Tokens of padding that one saves, in the time of a step of a common load
    # on a GPU, where the sizes of its kind do not tell; and seconds that it costs, beside one with all layers.
    saves: float = 0.0
    seconds: float = 1.0
    saves_padding_alone: bool = False  # which may be less than a first run takes

    @property
    def samples(self) -> bool:
        return Operand.HIDDEN in self.takes


def _decodes(size: int) -> StepShape:
    return StepShape(size, decodes_only=True)


def _shared(size: int) -> StepShape:
    return StepShape(size, decodes_only=True, shares=True)


def _step(
    name: str,
    purpose: str,
    shape: Callable[[Any], StepShape],
    function: Callable[[Compiled, StepShape], Callable[..., Any]],
    **more: Any,
) -> ProgramKind:
    """Tokens through the model."""
    return ProgramKind(
        name,
        purpose,
        lambda materials, size: function(materials.compiled, shape(size)),
        lambda materials, size: (padding(shape(size), materials.compiled.shapes)[0],),
        takes=(Operand.WEIGHTS, Operand.STATE),
        replaces=Operand.STATE,
        has_results=True,
        shape=shape,
        **more,
    )


def _burst(compiled: Compiled, shape: StepShape) -> Callable[..., Any]:
    return partial(decode, compiled, shape, compiled.shapes.burst)


def _one_each(compiled: Compiled, shape: StepShape) -> Callable[..., Any]:
    return partial(decode, compiled, shape, 1)


def _sampling(way: SamplingWay, purpose: str, saves: float, is_checked: bool = False) -> ProgramKind:
    def function(materials: Materials, size: int) -> Callable[..., Any]:
        compiled = materials.compiled
        kernels, has_checksums = compiled.kernels.sampling, compiled.shapes.fixed_order

        def sample(head: Any, slots: Any, hidden: Any, packed: Any, masks: Any) -> Any:
            rows = size, head, slots, hidden, packed, masks
            return sample_next(way, compiled.model, *rows, kernels, has_checksums)

        return sample

    return ProgramKind(
        way,
        purpose,
        function,
        _samples_of_none,
        takes=(Operand.HEAD, Operand.SLOTS, Operand.HIDDEN),
        replaces=Operand.SLOTS,
        has_results=True,
        shape=StepShape,  # to time its product would disturb that of decodes, which are compiled meanwhile
        is_checked=is_checked,
        counts="samples",
        saves=saves,
        seconds=0.3,
        saves_padding_alone=True,
    )


def _samples_of_none(materials: Materials, size: int) -> Inputs:
    compiled = materials.compiled
    count = num_sample_fields(compiled.shapes.guesses > 0) * size
    packed = np.full(count + NUM_FEATURES, compiled.shapes.num_slots, np.int32)
    packed[size:] = 0
    masks = (size, num_mask_words(compiled.model.vocab_size))
    return packed, array_like(masks, jnp.uint32, materials.whole)


def _put_adapter(materials: Materials, size: int) -> Callable[..., Any]:
    """Puts an adapter into its slot, where the others stay."""
    stacks, adapter = map(jax.tree.structure, (materials.adapters, one_adapter(materials.adapters)))

    def put_flat(flat: list[Any], slot: jax.Array, new: list[Any]) -> list[Any]:
        return jax.tree.leaves(put(jax.tree.unflatten(stacks, flat), slot, jax.tree.unflatten(adapter, new)))

    return put_flat


def _adapter_of_zeros(materials: Materials, size: int) -> Inputs:
    return np.int32(0), jax.tree.leaves(one_adapter(materials.adapters))


def _moving(name: str, purpose: str, function: Any, contents: Any, *, to_host: bool) -> ProgramKind:
    """`contents`: of the stacks and a number of pages, the structure of those pages on their way."""

    def moved(materials: Materials, size: int) -> Any:
        return contents(materials.stacks, size)

    def places(materials: Materials, size: int) -> Any:
        return jax.tree.map(lambda array: array.sharding, moved(materials, size))

    return ProgramKind(
        name,
        purpose,
        lambda materials, size: partial(function, materials.compiled.kernels.moves, materials.stacks),
        lambda materials, size: (np.zeros(size, np.int32), *(() if to_host else (moved(materials, size),))),
        takes=(Operand.PAGES,),
        replaces=None if to_host else Operand.PAGES,
        has_results=True,
        result_places=places if to_host else None,
        counts="pages",
    )


def _stacked(stacks: Sequence[Stack], num_pages: int) -> list[Any]:
    return [stack.like(num_pages) for stack in stacks]


def _states(name: str, purpose: str, into: Operand, source: Operand) -> ProgramKind:
    def nowhere(materials: Materials, size: int) -> Inputs:
        """From the row of padding to that of the other arrays, which for snapshots is the first."""
        rows = {Operand.SNAPSHOTS: 0, Operand.SLOT_ARRAYS: materials.compiled.shapes.num_slots}
        return (np.array([(rows[source], rows[into])] * size, np.int32),)

    return ProgramKind(
        name,
        purpose,
        lambda materials, size: copy_states,
        nowhere,
        takes=(into, source),
        replaces=into,
        counts="states",
        saves=ONE_PROGRAM,
        seconds=0.1,
    )


def _starting(
    name: str, purpose: str, counts: str, function: Any, inputs: Callable[[Materials, int], Inputs]
) -> ProgramKind:
    """Changes slots only."""
    return ProgramKind(
        name,
        purpose,
        lambda materials, size: function,
        inputs,
        takes=(Operand.SLOTS,),
        replaces=Operand.SLOTS,
        counts=counts,
        saves=ONE_PROGRAM,
        seconds=0.1,
    )


FORWARD = _step(
    "forward", "any step", lambda shape: shape, lambda *constants: partial(forward, *constants),
    gives_hidden=True, is_checked=True, saves_padding_alone=True,
)  # fmt: skip

KINDS: Mapping[str, ProgramKind] = {
    kind.name: kind
    for kind in (
        FORWARD,
        _step("decode", "decodes with their samples", _decodes, _one_each, times_decodes=True, saves=ONE_PROGRAM,
            saves_padding_alone=True,
        ),
        _step("burst", "several decodes after each other", _decodes, _burst, repeats=True, saves=ONE_PROGRAM),
        _step("shared", "decodes that read pages together, with their samples", _shared, _one_each, saves=0.5),
        _step(
            "verify", "looked up guesses, their step and its samples",
            StepShape, lambda *constants: partial(verify, *constants), saves=ONE_PROGRAM,
        ),
        _sampling("any", "samples that ask for anything", 0.15, is_checked=True),
        _sampling("plain", "samples that ask for nothing else", 2.7),
        _sampling("filtered", "samples with top-k, top-p or min-p", 2.7, is_checked=True),
        _starting(
            "start", "slots that begin", "slots", start_slots,
            lambda materials, size: (pack_starts([], size, materials.compiled.shapes),),
        ),
        _starting(
            "force", "tokens that are given", "tokens", force_tokens,
            lambda materials, size: (pack_forced([], size, materials.compiled.shapes),),
        ),
        ProgramKind(
            "guess",
            "guesses that are looked up",
            lambda materials, size: partial(guess_by_lookup, count=materials.compiled.shapes.guesses),
            lambda materials, size: (np.full(size, materials.compiled.shapes.num_slots, np.int32),),
            takes=(Operand.SLOTS,),
            replaces=Operand.SLOTS,
            counts="slots",
        ),
        ProgramKind(
            "draft",
            "guesses by the draft model",
            lambda materials, size: partial(guess_by_draft, materials.compiled, size),
            lambda materials, size: (pack_guesses([], [], size, materials.compiled.shapes),),
            takes=(Operand.WEIGHTS, Operand.STATE),
            replaces=Operand.STATE,
            shape=_decodes,
            counts="slots",
        ),
        ProgramKind(
            "copy",
            "copies of pages on the device",
            lambda materials, size: copy_pages,
            lambda materials, size: (np.zeros((size, 2), np.int32),),
            takes=(Operand.PAGES,),
            replaces=Operand.PAGES,
            counts="pages",
            saves=ONE_PROGRAM,
            seconds=0.1,
        ),
        _moving("save", "pages that leave the device", gather_pages, _stacked, to_host=True),
        _moving("split", "pages that leave the device in blocks", split_pages, blocks_like, to_host=True),
        _moving("restore", "pages that come back", scatter_pages, _stacked, to_host=False),
        _moving("place", "blocks of pages that come back", scatter_blocks, blocks_like, to_host=False),
        _states("save_state", "snapshots that are taken", Operand.SNAPSHOTS, Operand.SLOT_ARRAYS),
        _states("load_state", "snapshots that slots begin with", Operand.SLOT_ARRAYS, Operand.SNAPSHOTS),
        ProgramKind(
            "adapter",
            "adapters that are loaded",
            _put_adapter,
            _adapter_of_zeros,
            takes=(Operand.ADAPTERS,),
            replaces=Operand.ADAPTERS,
            counts="slots",
        ),
        ProgramKind("pages", "empty pages", lambda materials, size: materials.empty_layers),
        ProgramKind(
            "successor",
            "a check of the device",
            lambda materials, size: lambda number: number + 1,
            lambda materials, size: (array_like((), jnp.int32),),
        ),
    )
}  # fmt: skip


def kind_of(key: Key) -> ProgramKind:
    """Raises ValueError where there is no such kind."""
    if isinstance(key, StepShape):
        return FORWARD
    if key[0] not in KINDS:
        raise ValueError(f"there is no program of the kind {key[0]!r}")
    return KINDS[key[0]]


def size_of(key: Key) -> int:
    return key.tokens if isinstance(key, StepShape) else key[1]


def argument_of(key: Key) -> Any:
    """The argument of the functions of its kind."""
    return key if isinstance(key, StepShape) else key[1]


def shape_of(key: Key) -> StepShape | None:
    """The shape of the rows that it multiplies with weights; None where it does not."""
    shape = kind_of(key).shape
    return None if shape is None else shape(argument_of(key))


def in_words(key: Key) -> str:
    return str(key) if isinstance(key, StepShape) else f"{key[1]} {kind_of(key).counts} ({key[0]})"


class Operands(Protocol):
    """The operands of a process that are not in its state, and the structure of all."""

    @property
    def materials(self) -> Materials: ...

    def operand(self, part: Operand) -> Any: ...

    def replace_operand(self, part: Operand, value: Any) -> None: ...


def run(
    key: Key, program: Callable[..., Any], state: State, operands: Operands, inputs: Sequence[Any]
) -> tuple[State, Any]:
    """Run a program. Returns the state after it, and what it computes beside."""
    kind = kind_of(key)

    def taken(part: Operand) -> Any:
        if part is Operand.STATE:
            return state
        return getattr(state, part.value) if part.value in State._fields else operands.operand(part)

    results = program(*map(taken, kind.takes), *inputs)
    if kind.replaces is None:
        return state, results
    replaced, results = results if kind.has_results else (results, None)
    if kind.replaces is Operand.STATE:
        state = replaced
    elif kind.replaces.value in State._fields:
        state = state._replace(**{kind.replaces.value: replaced})
    else:
        operands.replace_operand(kind.replaces, replaced)
    return state, results


def run_on_padding(key: Key, program: Callable[..., Any], state: State, operands: Operands) -> State:
    """Run a program that writes to places that nothing reads; an adapter of zeros replaces the first one."""
    return run(key, program, state, operands, _padding_of(key, operands.materials))[0]


def _padding_of(key: Key, materials: Materials) -> Inputs:
    zeros: dict[int, jax.Array] = {}  # by structure: blocks that are alike are one

    def on_device(one: Any) -> Any:
        if not isinstance(one, jax.ShapeDtypeStruct):
            return one
        if id(one) not in zeros:
            zeros[id(one)] = put_on_devices(np.zeros(one.shape, one.dtype), one.sharding)
        return zeros[id(one)]

    made: Inputs = jax.tree.map(on_device, kind_of(key).inputs(materials, argument_of(key)))
    return made


def array_like(shape: tuple[int, ...], dtype: Any, where: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)  # type: ignore[no-untyped-call]
