"""The compiled programs. All are made ahead and none on the request path, unless `compile_all` is left out."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from typing import Any

from jax.sharding import Mesh

from quire.executor.adapter_arrays import AdapterArrays
from quire.executor.draft.draft import Draft
from quire.executor.programs.compile_processes import CompileProcesses
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.demand import ProgramDemand
from quire.executor.programs.first_runs import FirstRuns
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.order import WAYS, ProgramOrder
from quire.executor.programs.queue import ProgramQueue
from quire.executor.programs.replay import Announcer, Members, to_plain
from quire.executor.programs.step_costs import StepCosts
from quire.executor.programs.store import ProgramStore
from quire.executor.programs.switching import switch_often_until
from quire.executor.programs.table import Key, ProgramTable, size_of
from quire.executor.programs.timed_programs import TimedPrograms
from quire.executor.sample.sampler import Features
from quire.executor.shapes import Shapes
from quire.executor.step import State
from quire.models.model import Model
from quire.models.params import ParamTree

log = logging.getLogger(__name__)

UNFINISHED_S = 0.2  # after which another program may be compiled


class Programs:
    """Compiles on threads of its own; everything else happens on one thread at a time, the engine's in the end.

    `table` says which programs are used. It changes at named moments only (`advance`), first when those are there that
    any plan can run with. A program that is being loaded from disk counts as complete: a step that wants it waits for
    that moment. A program that is in no table when it is wanted is waited for, and counted.
    """

    def __init__(
        self,
        model: Model,
        weights: ParamTree,
        shapes: Shapes,
        threads: int,
        mesh: Mesh | None = None,
        store: ProgramStore | None = None,
        members: Members | None = None,
        draft: Draft | None = None,
        host_kinds: Sequence[str] = (),
        processes: CompileProcesses | None = None,
    ) -> None:
        """`members`: other processes that run the same programs. `draft`: the model that guesses. `host_kinds`: the
        programs that copy pages to the host and from it, where that is done. `processes`: they fill the store, so that
        threads here load programs and trace none, other than those with products that XLA times."""
        self.model = model
        self._shapes = shapes
        self.compiler = Compiler(model, weights, shapes, mesh, store, draft)
        self.has_draft = draft is not None
        self.order = ProgramOrder(shapes, host_kinds, self.compiler.moved_page_bytes, draft is None)
        self._demand = ProgramDemand(shapes.ladder, [key for batch in self.order.batches for key in batch], WAYS)
        self.table = ProgramTable(shapes.ladder)
        self._slow: frozenset[Key] = frozenset()
        self._made: dict[Key, Any] = {}
        self._compiling: dict[Key, Future[Any]] = {}
        self._loading: set[Key] = set()  # those of them that are kept on disk
        self._timed = TimedPrograms(self.compiler)
        self._batches: list[list[Key]] = []  # that the table does not have yet
        self._complete: frozenset[Key] = frozenset()  # programs of batches that are complete
        self._runs = FirstRuns(shapes)
        self._is_serving = False
        self._step_costs = StepCosts(shapes.ladder.cut_sizes)
        self._good_sizes: tuple[int, ...] = ()  # tokens of the steps that the device is good at, once they are timed
        self._pool = ThreadPoolExecutor(threads, "quire-compile")
        # On a CPU the time that a program takes to compile counts for more than the padding that it saves.
        self._queue = ProgramQueue(self._pool, self._make, self._demand.rank if shapes.specialised else None)
        # XLA may time kernels for decodes, which busy processors disturb; so few of those are compiled at a time.
        self._tuning_pool = ThreadPoolExecutor(min(threads, 2), "quire-tune")
        self.adapters = AdapterArrays(self.compiler)
        self._ahead = False  # whether everything was to be compiled before it is needed
        self.num_late = 0  # programs that a step waited for; stays 0 if it was
        self._announcer = None if members is None else Announcer(members)
        self._processes = processes
        self._is_closed = False
        if processes is not None and store is not None:
            self.compiler.timings = store.shared_timings()

    @property
    def weights(self) -> tuple[Any, ...]:
        """The arrays that every step takes: the model's and those of the adapters."""
        return self.adapters.weights

    def put_adapter(self, slot: int, adapter: list[Any]) -> None:
        """Replace the adapter in a slot. `adapter` is the flat form of `host_adapter`."""
        self.adapters.put(self.get(("adapter", 0)), slot, adapter)

    def load_kept(self) -> None:
        """Begin to load the programs of a server's first requests, as far as they are on disk: small ones first, since
        the first request wants those."""
        early = [key for key in (*self.order.first, *self.order.early) if key not in self._compiling]
        for key in sorted(filter(self.compiler.is_kept, early), key=size_of):
            self._compiling[key] = self._begin(key)
            # A GPU runs the first ones once before it serves, and the members of a group make theirs together.
            if not self._shapes.specialised and self._announcer is None:
                self._loading.add(key)

    def begin(self) -> None:
        """Begin to make what needs no timing of kernels, which loading weights disturbs. Their structure is enough."""
        if self._ahead:
            return
        self._ahead = True
        keys = [key for batch in self.order.batches for key in batch]
        if self._announcer is None:  # members may lack what is kept here
            self._timed.kept = frozenset(filter(self.compiler.is_kept, keys))
        if self._processes is not None:
            missing = set(self.order.for_processes) - self._made.keys() - self._compiling.keys() - self._timed.kept
            wanted = {key for key in missing if not self._timed.times(key)}
            # Those that wait for another are begun late.
            self._processes.want(wanted, {key for key in self.order.first if self._timed.timed_for(key) is None})
        self._begin_missing(key for key in keys if not self._timed.times(key) and self._timed.timed_for(key) is None)

    def set_weights(self, weights: ParamTree, draft: Draft | None) -> None:
        """The weights themselves, where programs have begun with their structure."""
        planned = self.compiler.weight_structure
        self.compiler.set_weights(weights, draft)
        if self.compiler.weight_structure != planned:
            raise RuntimeError("the weights have another structure than was planned: no program fits them")
        self.adapters = AdapterArrays(self.compiler)

    def compile_all(self) -> Iterator[float]:
        """Compile everything, telling the share done."""
        self.begin()
        return self._compile_together(self.order.batches, self.order.first)

    @property
    def can_run_anything(self) -> bool:
        """True if every plan finds its programs in the table, and on a GPU has them run once; those still to come are
        faster for some plans. Not while XLA times kernels, which steps would disturb."""
        ready = self._complete & self._runs.done if self._shapes.specialised else self._complete
        if self._shapes.fixed_order and (self._compiling or self._made.keys() - self._runs.done):
            return False  # none is used that has not been held to the others
        return ready.issuperset(self.order.first) and not self._is_timing

    @property
    def _is_timing(self) -> bool:
        return any(self._timed.is_timed(key) and not future.done() for key, future in self._compiling.items())

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Tokens of the steps that prompts are cut for: those that the device is good at; on a GPU that serves before
        they are timed, those of programs that steps may use. (): all are alike."""
        return self._step_costs.sizes_among(self.table.keys) if self._demand.is_noted else self._good_sizes

    @property
    def can_begin_at_once(self) -> bool:
        """True if the programs that a server needs to begin are on disk: they are loaded in a moment."""
        return all(self.compiler.is_kept(key) for key in self.order.first)

    @property
    def num_made_of_needed(self) -> tuple[int, int]:
        """Of the programs without which a server does not begin: those that are made, and all."""
        needed = (
            {key for batch in self.order.batches for key in batch} if self._shapes.fixed_order else self.order.first
        )
        return sum(key in self._made for key in needed), len(needed)

    @property
    def num_unfinished(self) -> int:
        """Programs that are being compiled or loaded, or wait for it. Other threads may ask."""
        return sum(not future.done() for future in list(self._compiling.values()))

    def begin_serving(self) -> None:
        """From now on first runs are spread. Log how many programs are still to come, and when all are there; until
        then no thread keeps Python for long."""
        self._is_serving = True
        self._demand.is_noted = self._shapes.specialised and not self._good_sizes
        if self._processes is not None:
            self._queue.limit(self._processes.slow_down())
        left = [future for future in self._compiling.values() if not future.done()]
        if not left or self._loading:  # what is loaded takes a moment
            return
        log.info("%d more programs are compiled behind the first requests, which run in larger ones", len(left))
        begun_s = time.monotonic()

        def tell() -> None:
            if not self._is_closed:
                log.info("all programs are compiled, after %.0f s more", time.monotonic() - begun_s)

        switch_often_until(left, tell)

    def compile_for_one(self, num_tokens: int) -> Iterator[float]:
        """Compile the programs of a single sequence, after a prompt of `num_tokens`; yields the share done."""
        return self._compile_together([keys := self.order.for_one(num_tokens)], keys)

    def _compile_together(self, batches: list[list[Key]], needed: Iterable[Key]) -> Iterator[float]:
        """Compile the missing programs in parallel. Raises if one of the `needed` fails."""
        self._batches += batches
        self._begin_missing(wanted := [key for batch in batches for key in batch])
        futures = {self._compiling[key]: key for key in wanted if key in self._compiling}
        self.advance()  # to those that are being loaded
        if futures:
            yield 0.0
        for done, future in enumerate(as_completed(futures), start=1):
            if futures[future] in needed:
                future.result()
            self.advance()
            yield done / len(futures)
        self.advance()

    def _begin_missing(self, keys: Iterable[Key]) -> None:
        missing = [key for key in dict.fromkeys(keys) if key not in self._made and key not in self._compiling]
        for key in sorted(missing, key=lambda key: self._timed.timed_for(key) is not None):
            self._compiling[key] = self._begin(key)

    def _begin(self, key: Key) -> Future[Any]:
        """Make a program on a thread. XLA times products of decodes once for all programs that have the same."""
        first = self._timed.timed_for(key)
        if first is None and not self._timed.is_timed(key):
            return self._queue.add(key)
        other = None if first is None else self._compiling.get(first)
        return self._tuning_pool.submit(self._make, key) if other is None else self._queue.add(key, other)

    def _make(self, key: Key) -> Any:
        """Make a program. With members it counts as made when all of them have it."""
        if self._processes is not None and not self._processes.make(key) and self._is_closed:
            raise CancelledError("the engine has ended")
        if self._announcer is None:
            return self.compiler.make(key)
        self._announcer.members.prepare(to_plain(key))
        program = self.compiler.make(key)
        self._announcer.members.confirm(to_plain(key))
        return self._announcer.wrapped(key, program)

    def advance(self) -> None:
        """Take in the batches that are complete, in their order. A server on a GPU, or whose kernels skip padding,
        takes in each program that is made: one for fewer tokens saves much. The table of a GPU has those that have run,
        and, when the next first run may be, those that are worth one."""
        self._collect()
        unfinished = self._compiling.keys() - self._loading
        while self._batches and unfinished.isdisjoint(self._batches[0]):
            self._complete |= {key for key in self._batches.pop(0) if key in self._made or key in self._compiling}
        if self._is_serving and (self._shapes.specialised or self._shapes.skips_padding):
            self._complete |= self._made.keys()
        keys = self._complete
        if self._is_serving and self._shapes.specialised and self._runs.done.issuperset(self.order.first):
            keys = self._runs.usable(keys, self._demand.is_worth_a_first_run)
        if keys != self.table.keys:
            self.table = ProgramTable(self._shapes.ladder, keys, self._slow)

    def _collect(self) -> None:
        for key in [key for key, future in self._compiling.items() if future.done()]:
            future = self._compiling.pop(key)
            self._loading.discard(key)
            if (error := future.exception()) is None:
                self._made[key] = future.result()
            else:  # a larger program runs in its place
                log.error("a program could not be compiled: %s: %r", key, error)

    def forward(self, needed: StepShape, num_tiles: int) -> tuple[StepShape, Callable[..., Any]]:
        shape = self.table.forward(needed, num_tiles)
        self._demand.note_forward(needed, num_tiles, shape)
        return shape, self.get(shape)

    def decode(self, rows: int, burst: int, shares: bool = False) -> tuple[StepShape, Callable[..., Any]] | None:
        found = self.table.decode(rows, burst, self._shapes.burst, shares)
        self._demand.note_decode(rows, burst, self._shapes.burst, shares, found, self.table)
        return None if found is None else (found[0], self.get(found[1]))

    def verify(self, tokens: int) -> tuple[str, int] | None:
        key = self.table.verify(tokens)
        self._demand.note_verify(tokens, key)
        return key

    def copy_states(self, kind: str, count: int) -> tuple[int, Callable[..., Any]]:
        """The program that copies so many states of slots, or as many of them as one call can."""
        size = self.table.state_size(kind, count)
        return size, self.get((kind, size))

    def sample(self, count: int, features: Features) -> tuple[tuple[str, int], Callable[..., Any]]:
        key = self.table.sample(count, features)
        self._demand.note_sample(count, features, key)
        return key, self.get(key)

    def get(self, key: Key) -> Callable[..., Any]:
        is_new = key not in self.table.keys
        if key not in self._made:
            if is_new:
                self.num_late += 1
                level = logging.WARNING if self._ahead else logging.INFO
                log.log(level, "a step waits for a program to be compiled: %s", key)
            compiling = self._compiling.pop(key, None)
            self._loading.discard(key)
            self._made[key] = self._make(key) if compiling is None else compiling.result()
        if is_new:
            self._complete |= {key}
            self.table = ProgramTable(self._shapes.ladder, self.table.keys | {key}, self._slow)
        program: Callable[..., Any] = self._made[key]
        return program if key in self._runs.done or not self._is_serving else self._runs.timed(key, program)

    def rehearse(self, state: State) -> State:
        """Run every program that is made once, on padding: a GPU takes its time to load one that it has not run. As
        long as some of the first are missing, only those: a server waits for them, or in a fixed order for all. Not
        while XLA times kernels."""
        self.advance()
        if self._is_timing:
            return state
        is_enough = self._complete.issuperset(self.order.first) if self._shapes.fixed_order else self.can_run_anything
        for key in [key for key in self._made if is_enough or key in self.order.first]:
            state = self._runs.rehearse(self, self._made[key], key, state)
        return state

    def rehearse_one(self, state: State) -> tuple[State, float | None]:
        """Run a program that has not run yet, other than the one that replaces an adapter, as one may be in its place.
        Also returns the seconds after which there may be another; None when all are made and have run."""
        wait_s = UNFINISHED_S if self.num_unfinished else None
        self.advance()
        if left := [key for key in self._made if key not in self._runs.done and key != ("adapter", 0)]:
            key = min(left, key=self._demand.rank)
            return self._runs.rehearse(self, self._made[key], key, state), 0.0
        return state, wait_s

    def checked(self, key: Key, state: State) -> State:
        """Before a program is used: where rows are to have the same bits in all, hold it to that."""
        return self._runs.rehearse(self, self.get(key), key, state) if self._runs.rows.is_due(key) else state

    def measure_one(self, state: State) -> tuple[State, bool]:
        """Time one of the steps that prompts are cut for; also returns whether there was one. When all are timed,
        `step_sizes` are those that the device is good at, and none is chosen that takes longer than a larger one."""
        size = self._step_costs.next_size(self._made)
        if size is not None:
            return self._step_costs.measure(size, self, self._made[StepShape(size)], state), True
        self._slow, self._good_sizes = self._step_costs.conclude()
        self._demand.is_noted = False
        self.table = ProgramTable(self._shapes.ladder, self.table.keys, self._slow)
        return state, False

    def close(self) -> None:
        self._is_closed = True
        if self._processes is not None:
            self._processes.close()
        self._queue.close()
        for pool in (self._pool, self._tuning_pool):
            pool.shutdown(wait=False, cancel_futures=True)
