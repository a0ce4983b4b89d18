"""The choice of the program that is made next, and of those that may run for the first time, by one score.

As long as a server lacks programs, steps run in larger ones, and the padding of each step is counted for the program
that would have saved it. A program's score is the tokens that it is expected to save and those that steps have missed
by it, per second that it costs to make. The highest is made next, and by an idle server run next: a GPU takes as long
as for thousands of tokens to load a program. Beside requests a program has its first run once its absence has cost as
much.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Condition
from typing import Any, Protocol

from quire.executor.programs.catalog import Catalog
from quire.executor.programs.kinds import Key, kind_of, shape_of
from quire.executor.programs.ladder import StepShape, weighed
from quire.executor.programs.table import ProgramTable
from quire.executor.sample.sampler import Features
from quire.executor.shapes import Shapes

log = logging.getLogger(__name__)

FIRST_RUN_TOKENS = 2048.0  # of padding that a first run in a step has to save: 45 ms of an 8B model on an H200
START_TOKENS = 32.0  # that take as long as to start one more program, or one with branches
SAMPLES_OF_A_TOKEN = 8  # rows of sampling that take as long as a token
# Of the time of steps, what first runs in their midst may take: of programs that steps have missed for as long, and of
# others.
SHARE, SELDOM_SHARE = 0.1, 0.01
TUNING_THREADS = 2  # XLA may time kernels for decodes, which busy processors disturb


class ProductTimes(Protocol):
    """The products that XLA chooses by timing them."""

    def times_decodes(self, rows: int) -> bool: ...

    def times_few(self, rows: int) -> bool: ...


class CompileScheduler:
    """Threads take programs from it to make them; all else is the engine thread's.

    Every future that `add` returns gets a result or an error, or is cancelled.
    """

    def __init__(
        self,
        catalog: Catalog,
        shapes: Shapes,
        compiler: ProductTimes,
        make: Callable[[Key], Any],
        threads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads`: the number of those that make programs; with 0 the callers of `take` do."""
        self.is_noted = False  # whether what steps miss is: on a GPU that serves, until its steps are timed
        self.ran: set[Key] = set()  # programs that have run
        self.kept: frozenset[Key] = frozenset()  # on disk before any was made: to load them times nothing
        self._catalog = catalog
        self._max_burst = shapes.burst
        self._all = ProgramTable(shapes.ladder, catalog.keys)
        self._missed: defaultdict[Key, float] = defaultdict(float)  # tokens of padding
        self._rows: int | None = None  # of the decodes noted last, if a program of their own was missed
        self._compiler = compiler
        self._clock = clock
        self._next_s = self._next_seldom_s = float("-inf")  # when there may be first runs beside requests
        self._make = make
        self._pool = ThreadPoolExecutor(threads, "quire-compile") if threads else None
        self._tuning_pool = ThreadPoolExecutor(min(threads, TUNING_THREADS) or 1, "quire-tune")
        self._changed = Condition()  # with the lock of all that follows
        self._waiting: dict[Key, Future[Any]] = {}
        self._num_making = 0
        self._most: int | None = None
        self._is_closed = False

    def score(self, key: Key) -> float:
        """The tokens of padding that it saves, per second that it costs to make."""
        return self._catalog.expected(key) + self._missed.get(key, 0.0) / kind_of(key).seconds

    # Order of compilation.

    def add(self, key: Key, futures: dict[Key, Future[Any]]) -> Future[Any]:
        """Make a program on a thread: the one with the highest score when a thread is free, or the one that was added
        first. One whose products XLA times for another of the `futures` waits for that, whatever becomes of it; where
        that is cancelled, so is this."""
        timed = self.timed_for(key)
        other = None if timed is None else futures.get(timed)
        if other is None and (timed is not None or self.is_timed(key)):
            return self._tuning_pool.submit(self._make, key)
        future: Future[Any] = Future()
        if other is None:
            self._put(key, future)
        else:
            other.add_done_callback(lambda other: _cancel(future) if other.cancelled() else self._put(key, future))
        return future

    def is_timed(self, key: Key) -> bool:
        """True for a program of decodes whose products XLA chooses by timing them, which loading weights and steps
        disturb. A product is timed once for all programs that have it."""
        shape = shape_of(key)
        times = shape is not None and kind_of(key).times_decodes and self._compiler.times_decodes(shape.tokens)
        return times and key not in self.kept

    def times(self, key: Key) -> bool:
        """True if XLA times products of this program that no other has timed."""
        shape = shape_of(key)
        is_other = shape is not None and not shape.decodes_only and self._compiler.times_few(shape.tokens)
        return self.is_timed(key) or (is_other and key not in self.kept)

    def timed_for(self, key: Key) -> Key | None:
        """The program for as many decodes that times the products of this one; None where none does."""
        shape = shape_of(key)
        if shape is None or not shape.decodes_only or kind_of(key).times_decodes:
            return None
        first = ("decode", shape.tokens)
        return first if self.is_timed(first) else None

    def limit(self, most: int | None) -> None:
        """From now on make no more than `most` at a time; None: as many as there are threads."""
        with self._changed:
            self._most = most
            self._changed.notify_all()

    def take(self) -> tuple[Key, Future[Any]] | None:
        """The next program, as soon as it may be made; None when nothing waits."""
        with self._changed:
            while self._most is not None and self._num_making >= self._most and not self._is_closed:
                self._changed.wait()
            if not self._waiting:
                return None
            key = max(self._waiting, key=self.score)
            self._num_making += 1
            return key, self._waiting.pop(key)

    def close(self) -> None:
        """Cancel all that wait."""
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for future in waiting.values():
            _cancel(future)
        for pool in (self._pool, self._tuning_pool):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _put(self, key: Key, future: Future[Any]) -> None:
        with self._changed, suppress(RuntimeError):  # the latter where the interpreter ends
            if not self._is_closed:
                if self._pool is not None:
                    self._pool.submit(self._make_one)
                self._waiting[key] = future
                return
        _cancel(future)

    def _make_one(self) -> None:
        taken = self.take()
        if taken is None:
            return
        key, future = taken
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(self._make(key))
        except BaseException as error:  # the owner of the future learns of it
            future.set_exception(error)
        finally:
            with self._changed:
                self._num_making -= 1
                self._changed.notify_all()

    # First runs.

    @property
    def allows_first_run(self) -> bool:
        """True if a step may use a program that has not run, and that steps have missed."""
        return self._clock() >= self._next_s

    def usable(self, keys: frozenset[Key]) -> frozenset[Key]:
        """The programs that a step may use: those that have run and, when the next first run may be, those that are
        worth one; after a longer time, all."""
        ran = keys & self.ran
        if not self.allows_first_run:
            return ran
        return keys if self._clock() >= self._next_seldom_s else ran.union(filter(self.is_worth_a_first_run, keys))

    def is_worth_a_first_run(self, key: Key) -> bool:
        """True if a step may run a program for the first time. Those that save more than padding always are."""
        return not kind_of(key).saves_padding_alone or self._missed.get(key, 0.0) >= FIRST_RUN_TOKENS

    def timed(self, key: Key, program: Callable[..., Any]) -> Callable[..., Any]:
        """A program that is about to run for the first time, in a step."""

        def run(*arguments: Any) -> Any:
            begun_s = self._clock()
            result = program(*arguments)
            took_s = self._clock() - begun_s
            log.debug("first run of %s, in a step: launched in %.0f ms", key, 1000 * took_s)
            self.ran.add(key)
            # Two programs of one step count as two.
            self._next_s = max(self._next_s, begun_s) + took_s / SHARE
            self._next_seldom_s = max(self._next_seldom_s, begun_s) + took_s / SELDOM_SHARE
            return result

        return run

    # Padding that missing programs would have saved.

    def note_forward(self, needed: StepShape, num_tiles: int, chosen: StepShape) -> None:
        """A launch that needs this shape runs in the program `chosen`."""
        if not self.is_noted:
            return
        rows, self._rows = self._rows, None
        if needed.decodes_only and needed.tokens == rows:
            return  # the program that does it all would have saved this one too
        best = self._all.forward(needed, num_tiles)
        if best != chosen:
            self._missed[best] += max(0.0, weighed(chosen) - weighed(best))

    def note_decode(
        self, rows: int, burst: int, shares: bool, chosen: tuple[StepShape, Key] | None, table: ProgramTable
    ) -> None:
        """Decodes run in the program `chosen` from a table, or, where there is none, in two."""
        best = self._all.decode(rows, burst, self._max_burst, shares) if self.is_noted else None
        if best is None or best == chosen:
            return
        shape = table.forward(StepShape(rows, decodes_only=True), 0) if chosen is None else chosen[0]
        is_other = chosen is None or chosen[1][0] != best[1][0]
        self._missed[best[1]] += max(0, shape.tokens - best[0].tokens) + START_TOKENS * is_other
        self._rows = rows if chosen is None and burst == 1 else None

    def note_verify(self, tokens: int, chosen: tuple[str, int] | None) -> None:
        """So many tokens with guesses run in the program `chosen`, or, where there is none, in three."""
        best = self._all.verify(tokens) if self.is_noted else None
        if best is not None and best != chosen:
            self._missed[best] += 2 * START_TOKENS if chosen is None else max(0, chosen[1] - best[1])

    def note_sample(self, count: int, features: Features, chosen: tuple[str, int]) -> None:
        """`count` tokens are sampled by the program `chosen`."""
        best = self._all.sample(count, features) if self.is_noted else chosen
        if best != chosen:
            padding = max(0, chosen[1] - best[1]) / SAMPLES_OF_A_TOKEN
            self._missed[best] += padding + START_TOKENS * (best[0] != chosen[0])


def _cancel(future: Future[Any]) -> None:
    """Cancel a future that has not begun, and tell those that wait for it."""
    future.cancel()
    future.set_running_or_notify_cancel()
