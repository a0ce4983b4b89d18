"""The compiled programs. All are made ahead and none on the request path, unless `compile_all` is left out."""

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, as_completed, wait
from threading import Thread
from typing import Any

from quire.executor.adapter_arrays import AdapterArrays
from quire.executor.draft.draft import Draft
from quire.executor.programs.catalog import Catalog
from quire.executor.programs.compile_processes import CompileProcesses
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import Key, Materials, Operand, run_on_padding, size_of
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.replay import Announcer, Members, to_plain
from quire.executor.programs.row_check import RowCheck
from quire.executor.programs.scheduler import CompileScheduler
from quire.executor.programs.step_costs import StepCosts
from quire.executor.programs.table import ProgramTable
from quire.executor.sample.sampler import Features
from quire.executor.snapshot_arrays import SnapshotArrays
from quire.executor.step import State
from quire.models.params import ParamTree

log = logging.getLogger(__name__)

UNFINISHED_S = 0.2  # after which another program may be compiled
SWITCH_S = 0.0001  # for which a thread that traces a program may keep Python from the one that launches steps


class Programs:
    """Compiles on threads of its own; everything else happens on one thread at a time, the engine's in the end.

    `table` says which programs are used. It changes at named moments only (`advance`), first when those are there that
    any plan can run with. A program that is being loaded from disk counts as made: a step that wants it waits for that
    moment. A program that is in no table when it is wanted is waited for, and counted.
    """

    def __init__(
        self,
        compiler: Compiler,
        threads: int,
        members: Members | None = None,
        host_kinds: Sequence[str] = (),
        processes: CompileProcesses | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`members`: other processes that run the same programs. `host_kinds`: the programs that copy pages to the host
        and from it, where that is done; members have no part of them. `processes`: they fill the store, so that threads
        here load programs and trace none, other than those with products that XLA times."""
        assert members is None or not host_kinds
        self.compiler = compiler
        self._shapes = shapes = compiler.shapes
        self.catalog = Catalog(shapes, host_kinds, compiler.moved_page_bytes, not compiler.has_draft)
        self.scheduler = CompileScheduler(self.catalog, shapes, compiler, self._make, threads, clock)
        self.table = ProgramTable(shapes.ladder)
        self._slow: frozenset[Key] = frozenset()
        self._made: dict[Key, Any] = {}
        self._compiling: dict[Key, Future[Any]] = {}
        self._loading: set[Key] = set()  # those of them that are kept on disk
        self._needed: frozenset[Key] = frozenset()  # those before which the table gains none
        self.rows = RowCheck(shapes)
        self._clock = clock
        self._is_serving = False
        self.step_costs = StepCosts(shapes.ladder.cut_sizes)
        self._good_sizes: tuple[int, ...] = ()  # tokens of the steps that the device is good at, once they are timed
        self.adapters = AdapterArrays(compiler)
        self.snapshots = SnapshotArrays(self._copying, compiler)
        self._ahead = False  # whether everything was to be compiled before it is needed
        self.num_late = 0  # programs that a step waited for; stays 0 if it was
        self.members = members
        self.host_kinds = tuple(host_kinds)
        self._announcer = None if members is None else Announcer(members)
        self._processes = processes
        self._is_closed = False
        if processes is not None:
            compiler.share_timings()

    @property
    def weights(self) -> tuple[Any, ...]:
        """The arrays that every step takes: the model's and those of the adapters."""
        return self.adapters.weights

    @property
    def materials(self) -> Materials:
        return self.compiler.materials

    def operand(self, part: Operand) -> Any:
        """An operand that is not in the state."""
        if part is Operand.HIDDEN:
            return self.compiler.no_hidden()
        return {
            Operand.WEIGHTS: self.weights,
            Operand.HEAD: self.compiler.head,
            Operand.SNAPSHOTS: self.snapshots.arrays,
            Operand.ADAPTERS: self.adapters.arrays,
        }[part]

    def replace_operand(self, part: Operand, value: Any) -> None:
        if part is Operand.SNAPSHOTS:
            self.snapshots.arrays = value
        else:
            assert part is Operand.ADAPTERS, f"{part} is never replaced"
            self.adapters.replace(value)

    def put_adapter(self, slot: int, adapter: list[Any]) -> None:
        """Replace the adapter in a slot. `adapter` is the flat form of `host_adapter`."""
        self.adapters.put(self.get(("adapter", 0)), slot, adapter)

    def load_kept(self) -> None:
        """Begin to load the programs of a server's first requests, as far as they are on disk: small ones first, since
        the first request wants those."""
        early = [key for key in (*self.catalog.first, *self.catalog.early) if key not in self._compiling]
        for key in sorted(filter(self.compiler.is_kept, early), key=size_of):
            self._compiling[key] = self.scheduler.add(key, self._compiling)
            # A GPU runs the first ones once before it serves, and the members of a group make theirs together.
            if not self._shapes.specialised and self._announcer is None:
                self._loading.add(key)

    def begin(self) -> None:
        """Begin to make what needs no timing of kernels, which loading weights disturbs. Their structure is enough."""
        if self._ahead:
            return
        self._ahead = True
        scheduler, keys = self.scheduler, self.catalog.keys
        if self._announcer is None:  # members may lack what is kept here
            scheduler.kept = frozenset(filter(self.compiler.is_kept, keys))
        if self._processes is not None:
            missing = set(self.catalog.for_processes) - self._made.keys() - self._compiling.keys() - scheduler.kept
            wanted = {key for key in missing if not scheduler.times(key)}
            # Those that wait for another are begun late.
            self._processes.want(wanted, {key for key in self.catalog.first if scheduler.timed_for(key) is None})
        self._begin_missing(key for key in keys if not scheduler.times(key) and scheduler.timed_for(key) is None)

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
        return self.compile_together(self.catalog.keys, self.catalog.first)

    def compile_for_prompt(self, num_tokens: int) -> Iterator[float]:
        """Compile the programs of a single sequence, after a prompt of `num_tokens`; yields the share done."""
        keys = self.catalog.programs_for_prompt(num_tokens)
        return self.compile_together(keys, keys)

    @property
    def can_run_anything(self) -> bool:
        """True if every plan finds its programs in the table, and on a GPU has them run once; those still to come are
        faster for some plans. Not while XLA times kernels, which steps would disturb."""
        ready = self._there & self.scheduler.ran if self._shapes.specialised else self._there
        if self._shapes.fixed_order and (self._compiling or self._made.keys() - self.scheduler.ran):
            return False  # none is used that has not been held to the others
        return ready.issuperset(self.catalog.first) and not self._is_timing

    @property
    def _there(self) -> frozenset[Key]:
        """Programs that are made, or are there in a moment."""
        return frozenset(self._made.keys() | self._loading)

    @property
    def _is_timing(self) -> bool:
        return any(self.scheduler.is_timed(key) and not future.done() for key, future in self._compiling.items())

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Tokens of the steps that prompts are cut for: those that the device is good at; on a GPU that serves before
        they are timed, those of programs that steps may use. (): all are alike."""
        return self.step_costs.sizes_among(self.table.keys) if self.scheduler.is_noted else self._good_sizes

    @property
    def can_begin_at_once(self) -> bool:
        """True if the programs that a server needs to begin are on disk: they are loaded in a moment."""
        return all(self.compiler.is_kept(key) for key in self.catalog.first)

    @property
    def num_made_of_needed(self) -> tuple[int, int]:
        """Of the programs without which a server does not begin: those that are made, and all."""
        needed = self.catalog.keys if self._shapes.fixed_order else self.catalog.first
        return sum(key in self._made for key in needed), len(needed)

    @property
    def num_unfinished(self) -> int:
        """Programs that are being compiled or loaded, or wait for it. Other threads may ask."""
        return sum(not future.done() for future in list(self._compiling.values()))

    def begin_serving(self) -> None:
        """From now on first runs are spread. Log how many programs are still to come, and when all are there."""
        self._is_serving = True
        self.scheduler.is_noted = self._shapes.specialised and not self._good_sizes
        if self._processes is not None:
            self.scheduler.limit(self._processes.slow_down())
        left = [future for future in self._compiling.values() if not future.done()]
        if not left or self._loading:  # what is loaded takes a moment
            return
        log.info("%d more programs are compiled behind the first requests, which run in larger ones", len(left))
        begun_s = self._clock()

        def tell() -> None:
            if not self._is_closed:
                log.info("all programs are compiled, after %.0f s more", self._clock() - begun_s)

        switch_often_until(left, tell)

    def compile_together(self, keys: Sequence[Key], needed: Sequence[Key]) -> Iterator[float]:
        """Compile the missing programs in parallel. Raises if one of the `needed` fails."""
        self._needed = frozenset(needed)
        self._begin_missing(keys)
        futures = {self._compiling[key]: key for key in keys if key in self._compiling}
        self.advance()  # to those that are being loaded
        if futures:
            yield 0.0
        for done, future in enumerate(as_completed(futures), start=1):
            if futures[future] in self._needed:
                future.result()
            self.advance()
            yield done / len(futures)
        self.advance()

    def _begin_missing(self, keys: Iterable[Key]) -> None:
        missing = [key for key in dict.fromkeys(keys) if key not in self._made and key not in self._compiling]
        for key in sorted(missing, key=lambda key: self.scheduler.timed_for(key) is not None):
            self._compiling[key] = self.scheduler.add(key, self._compiling)

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
        """Take in the programs that are made, once those are that are needed. The table of a GPU that serves has those
        that have run, and, when the next first run may be, those that are worth one."""
        self._collect()
        there = self._there
        keys = self.table.keys | there if there.issuperset(self._needed) else self.table.keys
        if self._is_serving and self._shapes.specialised and self.scheduler.ran.issuperset(self.catalog.first):
            keys = self.scheduler.usable(there)
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
        self.scheduler.note_forward(needed, num_tiles, shape)
        return shape, self.get(shape)

    def decode(self, rows: int, burst: int, shares: bool = False) -> tuple[StepShape, Callable[..., Any]] | None:
        chosen = self.table.decode(rows, burst, self._shapes.burst, shares)
        self.scheduler.note_decode(rows, burst, shares, chosen, self.table)
        return None if chosen is None else (chosen[0], self.get(chosen[1]))

    def verify(self, tokens: int) -> tuple[StepShape, Callable[..., Any]] | None:
        key = self.table.verify(tokens)
        self.scheduler.note_verify(tokens, key)
        return None if key is None else (StepShape(key[1]), self.get(key))

    def sample(self, count: int, features: Features) -> tuple[tuple[str, int], Callable[..., Any]]:
        key = self.table.sample(count, features)
        self.scheduler.note_sample(count, features, key)
        return key, self.get(key)

    def _copying(self, kind: str, count: int) -> tuple[int, Callable[..., Any]]:
        """The program that copies so many states of slots, or as many of them as one call can."""
        size = self.table.state_size(kind, count)
        return size, self.get((kind, size))

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
            self.table = ProgramTable(self._shapes.ladder, self.table.keys | {key}, self._slow)
        program: Callable[..., Any] = self._made[key]
        return program if key in self.scheduler.ran or not self._is_serving else self.scheduler.timed(key, program)

    def rehearse(self, state: State) -> State:
        """Run every program that is made once, on padding: a GPU takes its time to load one that it has not run. As
        long as some of the first are missing, only those: a server waits for them, or in a fixed order for all. Not
        while XLA times kernels."""
        self.advance()
        if self._is_timing:
            return state
        is_enough = self._shapes.fixed_order and self._there.issuperset(self.catalog.first)
        is_enough |= self.can_run_anything
        for key in [key for key in self._made if is_enough or key in self.catalog.first]:
            state = self._rehearsed(key, state)
        return state

    def rehearse_one(self, state: State) -> tuple[State, float | None]:
        """Run a program that has not run yet, other than the one that replaces an adapter, as one may be in its place.
        Also returns the seconds after which there may be another; None when all are made and have run."""
        wait_s = UNFINISHED_S if self.num_unfinished else None
        self.advance()
        if left := [key for key in self._made if key not in self.scheduler.ran and key != ("adapter", 0)]:
            return self._rehearsed(max(left, key=self.scheduler.score), state), 0.0
        return state, wait_s

    def checked(self, key: Key, state: State) -> State:
        """Before a program is used: where rows are to have the same bits in all, hold it to that."""
        if not self.rows.is_due(key):
            return state
        self.get(key)
        return self._rehearsed(key, state)

    def _rehearsed(self, key: Key, state: State) -> State:
        """Run a program on padding, unless it has run; where rows are to have the same bits in all, check it."""
        is_new, program = key not in self.scheduler.ran, self._made[key]
        self.scheduler.ran.add(key)
        if self.rows.is_due(key):
            return self.rows.run(key, program, state, self)
        if is_new:
            begun_s = self._clock()
            state = run_on_padding(key, program, state, self)
            log.debug("first run of %s: launched in %.0f ms", key, 1000 * (self._clock() - begun_s))
        return state

    def measure_one(self, state: State) -> tuple[State, bool]:
        """Time one of the steps that prompts are cut for; also returns whether there was one. When all are timed,
        `step_sizes` are those that the device is good at, and none is chosen that takes longer than a larger one."""
        size = self.step_costs.next_size(self._made)
        if size is not None:
            return self.step_costs.measure(size, self._made[StepShape(size)], state, self), True
        self._slow, self._good_sizes = self.step_costs.slow_and_good_sizes()
        self.scheduler.is_noted = False
        self.table = ProgramTable(self._shapes.ladder, self.table.keys, self._slow)
        return state, False

    def close(self) -> None:
        self._is_closed = True
        if self._processes is not None:
            self._processes.close()
        self.scheduler.close()


def switch_often_until(futures: Collection[Future[Any]], then: Callable[[], None]) -> None:
    """Lower the GIL switch interval until `futures` finish: tracing would keep Python from the thread that launches
    steps. `then` is called afterwards, on a thread that waits for nothing else: those that make programs may all be
    needed for the last of them."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)

    def finish() -> None:
        wait(futures)
        sys.setswitchinterval(usual_s)
        then()

    Thread(target=finish, name="quire-compiled", daemon=True).start()
