"""One engine over several processes: the leader announces each call of a program, and the others run the same.

A program that is compiled for the devices of several processes runs when all of them call it. Only the leader plans
and packs; what it calls a program with is weights and state, which every process has of its own, and a few small arrays
of the host, which are sent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from quire.executor.fused_steps import FUSED_KINDS
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.table import Key
from quire.executor.snapshot_arrays import LOAD, SAVE
from quire.executor.step import State
from quire.ops.sharding import put
from quire.request import num_mask_words

HostArray = np.ndarray[Any, np.dtype[Any]]
PlainKey = list[int | bool | str]

KEPT_FORWARDS = 4  # forward passes that may be sampled from still; a plan has two at most before it samples
AHEAD = 2  # calls that a follower may have under way


class Members(Protocol):
    """The other processes. Used by the engine's thread, `prepare` and `confirm` also by those that compile."""

    def prepare(self, key: PlainKey) -> None:
        """Let every member make this program."""

    def confirm(self, key: PlainKey) -> None:
        """Wait until every member has it; raise where one cannot make it."""

    def run(self, key: PlainKey, arrays: Sequence[HostArray | None], hidden: int) -> None:
        """Let every member run it, with these arrays. `hidden` counts back to the forward pass that is sampled from;
        0: none."""

    def reset(self) -> None:
        """Let every member begin with an empty state."""


def to_plain(key: Key) -> PlainKey:
    return list(key)


def from_plain(parts: PlainKey) -> Key:
    """Raises ValueError or TypeError where these are not the parts of a key."""
    if isinstance(parts[0], str):
        kind, size = parts
        return str(kind), int(size)
    return StepShape(*parts)  # type: ignore[arg-type]


def is_forward(key: Key) -> bool:
    return isinstance(key, StepShape)


def is_step(key: Key) -> bool:
    """Called with weights, the whole state and one array."""
    return isinstance(key, StepShape) or key[0] in FUSED_KINDS


class Announcer:
    """Wraps the leader's programs, so that each call is announced before it happens. Owned by the engine thread."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self._forwards: deque[jax.Array] = deque(maxlen=KEPT_FORWARDS)  # hidden vectors, the last one first

    def wrapped(self, key: Key, program: Callable[..., Any]) -> Callable[..., Any]:
        plain = to_plain(key)

        def call(*arguments: Any) -> Any:
            # Any other argument is weights or state, or stands for something that all members have alike.
            arrays = [one if isinstance(one, np.ndarray) else None for one in arguments if not isinstance(one, tuple)]
            self.members.run(plain, arrays, self._place_of(arguments))
            results = program(*arguments)
            if is_forward(key):
                self._forwards.appendleft(results[1].hidden)
            return results

        return call

    def _place_of(self, arguments: Sequence[Any]) -> int:
        for one in arguments:
            if isinstance(one, jax.Array):
                for place, hidden in enumerate(self._forwards, start=1):
                    if hidden is one:
                        return place
        return 0


class Follower:
    """Runs what the leader announces, on the weights and the state of this process. Owned by one thread, apart from
    what compiles."""

    def __init__(self, compiler: Compiler, vocab_size: int, hidden_size: int, num_threads: int) -> None:
        self._compiler = compiler
        self._mask_words = num_mask_words(vocab_size)
        self._hidden_size = hidden_size
        self._pool = ThreadPoolExecutor(num_threads, "quire-compile")
        self._programs: dict[Key, Any] = {}
        self._no_masks: dict[int, jax.Array] = {}
        self._under_way: deque[Any] = deque()
        self._state: State | None = None  # until the leader's first reset
        self._snapshots: list[Any] = []

    def reset(self) -> None:
        self._forwards: deque[jax.Array] = deque(maxlen=KEPT_FORWARDS)
        self._under_way.clear()
        self._state = None  # frees the old pages before there are new ones
        self._snapshots = []
        self._state = self._compiler.empty_state()
        if self._compiler.shapes.num_snapshots:
            self._snapshots = self._compiler.empty_snapshots()

    def prepare(self, parts: PlainKey, done: Callable[[str | None], None]) -> None:
        """Make a program on a thread; `done` is called there, with the reason where it cannot be made."""
        key = from_plain(parts)

        def make() -> None:
            if key not in self._programs:
                self._programs[key] = self._compiler.make(key)

        def tell(made: "Future[None]") -> None:
            error = made.exception()
            done(None if error is None else repr(error))

        self._pool.submit(make).add_done_callback(tell)

    def run(self, parts: PlainKey, arrays: Sequence[HostArray | None], hidden: int) -> None:
        key = from_plain(parts)
        program, state = self._programs[key], self._state
        assert state is not None
        given = [one for one in arrays if one is not None]
        if is_step(key):
            self._state, results = program(self._compiler.weights, state, *given)
            if is_forward(key):
                self._forwards.appendleft(results.hidden)
        elif key[0] == "copy":
            self._state = state._replace(pages=program(state.pages, *given))
            results = None
        elif key[0] == SAVE:
            self._snapshots = program(self._snapshots, state.slot_arrays, *given)
            results = None
        elif key[0] == LOAD:
            self._state = state._replace(slot_arrays=program(state.slot_arrays, self._snapshots, *given))
            results = None
        elif key[0] in ("start", "force", "guess"):
            self._state = state._replace(slots=program(state.slots, *given))
            results = None
        else:
            results = self._sample(key, program, state, arrays, hidden)
        self._limit(results)

    def _sample(self, key: Any, program: Any, state: State, arrays: Sequence[HostArray | None], place: int) -> Any:
        vectors, packed, masks = arrays[-3:]
        assert vectors is None, "hidden vectors stay on the devices"
        hidden = self._forwards[place - 1] if place else self._no_hidden()
        rows = masks if masks is not None else self._all_tokens(key[1])
        slots, sampled = program(self._compiler.head, state.slots, hidden, packed, rows)
        self._state = state._replace(slots=slots)
        return sampled

    def _no_hidden(self) -> jax.Array:
        """Zeros in place of hidden vectors, for rehearsals."""
        return jnp.zeros((self._compiler.shapes.num_samples, self._hidden_size), self._compiler.dtype)

    def _all_tokens(self, size: int) -> jax.Array:
        if size not in self._no_masks:
            masks = np.full((size, self._mask_words), 0xFFFFFFFF, np.uint32)
            self._no_masks[size] = put(masks, self._compiler.whole)
        return self._no_masks[size]

    def _limit(self, results: Any) -> None:
        """Wait for an older call. Its error, which nothing else would show, is raised here."""
        if results is not None:
            self._under_way.append(jax.tree.leaves(results)[-1])
        while len(self._under_way) > AHEAD:
            self._under_way.popleft().block_until_ready()
