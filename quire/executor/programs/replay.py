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
import numpy as np

from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import Key, Materials, Operand, kind_of, run, size_of
from quire.executor.programs.ladder import StepShape
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
        key = str(kind), int(size)
        kind_of(key)
        return key
    return StepShape(*parts)  # type: ignore[arg-type]


class Announcer:
    """Wraps the leader's programs, so that each call is announced before it happens. Owned by the engine thread."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self._forwards: deque[jax.Array] = deque(maxlen=KEPT_FORWARDS)  # hidden vectors, the last one first

    def wrapped(self, key: Key, program: Callable[..., Any]) -> Callable[..., Any]:
        plain, kind = to_plain(key), kind_of(key)

        def call(*arguments: Any) -> Any:
            parts, inputs = arguments[: len(kind.takes)], arguments[len(kind.takes) :]
            # What is on the devices already, all members have alike.
            arrays = [one if isinstance(one, np.ndarray) else None for one in inputs]
            self.members.run(
                plain, arrays, self._place_of(parts[kind.takes.index(Operand.HIDDEN)]) if kind.samples else 0
            )
            results = program(*arguments)
            if kind.gives_hidden:
                self._forwards.appendleft(results[1].hidden)
            return results

        return call

    def _place_of(self, hidden: jax.Array) -> int:
        return next((place for place, other in enumerate(self._forwards, start=1) if other is hidden), 0)


class Follower:
    """Runs what the leader announces, on the weights and the state of this process. Owned by one thread, apart from
    what compiles."""

    def __init__(self, compiler: Compiler, num_threads: int) -> None:
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(num_threads, "quire-compile")
        self._programs: dict[Key, Any] = {}
        self._all_tokens: dict[int, jax.Array] = {}  # masks that leave every token, by the number of their rows
        self._under_way: deque[Any] = deque()
        self.state: State | None = None  # until the leader's first reset
        self._snapshots: list[Any] = []
        self._sampled_place = 0  # of the forward pass that is sampled from, counted back; 0: none

    @property
    def materials(self) -> Materials:
        return self._compiler.materials

    def operand(self, part: Operand) -> Any:
        """An operand that is not in the state."""
        if part is Operand.HIDDEN:
            place = self._sampled_place
            return self._forwards[place - 1] if place else self._compiler.no_hidden()
        return {
            Operand.WEIGHTS: self._compiler.weights,
            Operand.HEAD: self._compiler.head,
            Operand.SNAPSHOTS: self._snapshots,
        }[part]

    def replace_operand(self, part: Operand, value: Any) -> None:
        assert part is Operand.SNAPSHOTS, "a group has no adapters"
        self._snapshots = value

    def reset(self) -> None:
        self._forwards: deque[jax.Array] = deque(maxlen=KEPT_FORWARDS)
        self._under_way.clear()
        self.state = None  # frees the old pages before there are new ones
        self._snapshots = []
        self.state = self._compiler.empty_state()
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
        assert self.state is not None
        key, self._sampled_place = from_plain(parts), hidden
        inputs = [self._masks(size_of(key)) if one is None else one for one in arrays]
        self.state, results = run(key, self._programs[key], self.state, self, inputs)
        if kind_of(key).gives_hidden:
            self._forwards.appendleft(results.hidden)
        self._limit(results)

    def _masks(self, size: int) -> jax.Array:
        """Of samples without grammars: all that is not sent."""
        if size not in self._all_tokens:
            masks = np.full((size, num_mask_words(self.materials.compiled.model.vocab_size)), 0xFFFFFFFF, np.uint32)
            self._all_tokens[size] = put(masks, self._compiler.whole)
        return self._all_tokens[size]

    def _limit(self, results: Any) -> None:
        """Wait for an older call. Its error, which nothing else would show, is raised here."""
        if results is not None:
            self._under_way.append(jax.tree.leaves(results)[-1])
        while len(self._under_way) > AHEAD:
            self._under_way.popleft().block_until_ready()
