"""Runs plans on JAX devices."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from quire.core.plan import Chunk, SlotStart, StepPlan
from quire.executor.adapter_arrays import digest_of
from quire.executor.draft.draft import Draft
from quire.executor.draft.guess_programs import GuessPrograms
from quire.executor.fused_steps import fused_shape
from quire.executor.host.host_pages import HostPages, as_bytes
from quire.executor.host.page_copies import PageCopies
from quire.executor.host.pinned_pages import PinnedPages, can_pin, host_kinds
from quire.executor.launch import Launch, Packer, num_samples, num_sampling, split
from quire.executor.pending import Launched, Pending, Wanted
from quire.executor.programs.compile_processes import CompileProcesses
from quire.executor.programs.order import FORCE_SIZE
from quire.executor.programs.programs import Programs
from quire.executor.programs.replay import Members
from quire.executor.programs.store import ProgramStore
from quire.executor.programs.table import COPY_SIZES
from quire.executor.sample.sampler import NOTHING_ASKED, Features, asked_by
from quire.executor.shapes import Shapes
from quire.executor.slots import pack_forced, pack_starts
from quire.executor.snapshot_arrays import SnapshotArrays
from quire.executor.step import State
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.ops.sharding import put
from quire.request import num_mask_words


class JaxExecutor:
    """Implements the engine's Executor. Owned by the engine thread; only compilation happens on others.

    All device state lives in `_state`, which every launch consumes and replaces. Launches run in order, so a plan may
    reuse pages and slots that launches before it still use.
    """

    def __init__(
        self,
        model: Model,
        weights: ParamTree,
        shapes: Shapes,
        compile_threads: int = 2,
        mesh: Mesh | None = None,
        store: ProgramStore | None = None,
        members: Members | None = None,
        draft: Draft | None = None,
        loads_ahead: bool = False,
        num_host_pages: int = 0,
        pins_host_pages: bool | None = None,
        processes: CompileProcesses | None = None,
        begun: Programs | None = None,
    ) -> None:
        """`members`: other processes that run every program with this one, each on its own devices. `draft`: the model
        that guesses; without it guesses are looked up. `loads_ahead`: kept programs are loaded on threads from now on,
        before `warm_up`. `num_host_pages`: pages of host memory that plans may copy to and from, page 0 not included;
        not with `members`, which have no part of them. `pins_host_pages`: in pinned memory; if not given, on GPUs.
        `processes` make programs in place of threads. `begun`: the programs, where they have begun with the structure
        of the weights; then nothing is made here."""
        assert members is None or not num_host_pages
        self._members = members
        self.platform = jax.default_backend()
        self.num_padding_tokens = 0  # beyond the tokens of plans, since programs have fixed shapes
        self._shapes = shapes
        is_pinned = num_host_pages > 0 and (can_pin() if pins_host_pages is None else pins_host_pages)
        kinds = host_kinds(num_host_pages, is_pinned)
        if begun is None:
            made_by: Any = {"store": store, "members": members, "processes": processes, "host_kinds": kinds}
            begun = Programs(model, weights, shapes, compile_threads, mesh, draft=draft, **made_by)
        else:
            begun.set_weights(weights, draft)
        self.programs = begun
        pages, kind = self.programs.compiler.pages, PinnedPages if is_pinned else HostPages
        self.host_pages = kind(pages, num_host_pages + 1) if num_host_pages else None
        if isinstance(self.host_pages, PinnedPages) and self.platform == "gpu":
            self.host_pages.pin_all()
        self._guesses = GuessPrograms(self.programs, shapes)
        self._copies = PageCopies(self.programs, self.host_pages, kinds)
        self.snapshots = SnapshotArrays(self.programs.copy_states, self.programs.compiler)
        if loads_ahead:
            self.programs.load_kept()
        self._mask_words = num_mask_words(model.vocab_size)
        self._adapters: dict[int, list[Any]] = {}  # on the host, by number: the arrays of each
        self._no_masks: dict[int, jax.Array] = {}
        devices = {one for leaf in jax.tree.leaves(weights) for one in leaf.devices()}
        self._devices = sorted((one for one in devices if one.process_index == jax.process_index()), key=str)
        self._state: State | None = None
        self.reset()
        self.check_device()  # so that it is compiled

    @property
    def num_late(self) -> int:
        """Programs compiled while a step waited for them."""
        return self.programs.num_late

    @property
    def num_unfinished(self) -> int:
        """Programs that are still being compiled or loaded."""
        return self.programs.num_unfinished

    def submit(self, plan: StepPlan) -> Pending:
        self.programs.advance()
        assert self._state is not None
        pages, copied = self._copies.begin(self._state.pages, plan)
        self._state = self._state._replace(pages=pages)
        for load in plan.adapter_loads:
            self.programs.put_adapter(load.slot - 1, self._adapters[load.number])
        self._begin_slots(plan)
        self._place_forced(plan)
        fused = self._guesses.fused(plan, self._special)
        if self._shapes.guesses and fused is None:
            self._state = self._guesses.place(self._state, plan.chunks, self._packer)
        special = [index for index, chunk in enumerate(plan.chunks) if chunk.slot in self._special]
        wanted = {index: self._wanted(plan.chunks[index]) for index in special}
        started = {start.slot for start in plan.started}
        pending = Pending(plan, wanted, self._sample, self._copies.take_lost)
        pending.copied = copied
        scored = [index for index in special if wanted[index].prompt_logprobs is not None]
        for launch in split(plan.chunks, scored, self._shapes.fixed_order) if plan.chunks else ():
            pending.launched += self._launch(plan, launch, started, fused)
        self.snapshots.save(self._state, plan.saves)
        return pending

    def reset(self) -> None:
        if self._members is not None:
            self._members.reset()
        if self.host_pages is not None:
            self.host_pages.drain()  # its pages stay
        self._copies.forget()
        self._packer = Packer(self._shapes)
        self._starts: list[SlotStart | None] = [None] * self._shapes.num_slots
        self._special: set[int] = set()  # slots with requests that need more than plain temperature sampling
        self._state = None  # frees the old pages before there are new ones
        self.snapshots.clear()
        self.programs.adapters.clear()
        self._state = self.programs.compiler.empty_state()

    def add_adapter(self, number: int, adapter: Any) -> None:
        """`adapter` is as `host_adapter` makes it. Plans may load it from now on."""
        self._adapters[number] = jax.tree.leaves(adapter)

    def drop_adapter(self, number: int) -> None:
        del self._adapters[number]

    def adapter_digest(self, adapter: Any) -> str:
        return digest_of(jax.tree.leaves(adapter))

    def read_pages(self, pages: Sequence[int]) -> Callable[[], memoryview]:
        assert self._state is not None
        self._state = self._state._replace(pages=self._copies.settle(self._state.pages)[0])
        parts = []
        for begin in range(0, len(pages), COPY_SIZES[-1]):
            run = pages[begin : begin + COPY_SIZES[-1]]
            size = next(size for size in COPY_SIZES if size >= len(run))
            sources = np.zeros(size, np.int32)
            sources[: len(run)] = run
            contents = self.programs.get(("save", size))(self._state.pages, sources)
            for one in contents:
                one.copy_to_host_async()
            parts.append((len(run), contents))
        return lambda: as_bytes(parts)

    def write_host_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        assert self.host_pages is not None, "there are no pages of the host"
        self.host_pages.write_bytes(pages, data)

    def check_device(self) -> None:
        for device in self._devices:
            found = int(self.programs.compiler.successor(jax.device_put(np.int32(41), device)))
            if found != 42:
                raise RuntimeError(f"{device} computes 41 + 1 = {found}")

    def warm_up(self) -> Iterator[float]:
        """Compile all programs, and run each once where that matters, telling the share done. A caller may leave off
        when `programs.can_run_anything`; then `warm_up_more` does the rest."""
        for share in self.programs.compile_all():
            if self._shapes.specialised:
                assert self._state is not None
                self._state = self.programs.rehearse(self._state)
            yield share
        while self.warm_up_more() is not None:
            pass

    def warm_up_more(self) -> float | None:
        """Run a program for the first time, or time a step when all have run. Returns the seconds after which there may
        be more to do; None when nothing is left. No step is under way."""
        assert self._state is not None
        if not self._shapes.specialised:
            return None
        self._state, wait_s = self.programs.rehearse_one(self._state)
        if wait_s is not None:
            return wait_s
        self._state, is_timed = self.programs.measure_one(self._state)
        if is_timed:
            return 0.0
        self._state = self.snapshots.rehearse(self._state)
        return None

    def prepare(self, num_tokens: int) -> Iterator[float]:
        """Compile the missing programs of a single prompt of `num_tokens`, yielding the share done."""
        return self.programs.compile_for_one(num_tokens)

    def close(self) -> None:
        self.programs.close()
        if self.host_pages is not None:
            self.host_pages.close()
        self._state = None
        self.snapshots.close()

    def _begin_slots(self, plan: StepPlan) -> None:
        """Put the tokens, first pages and sampling state of the slots that begin on the device."""
        if not plan.started:
            return
        first_pages = {chunk.slot: chunk.new_pages for chunk in plan.chunks}
        starts = [(start, first_pages[start.slot]) for start in plan.started]
        for start, pages in starts:
            self._starts[start.slot] = start
            asks = any(asked_by(start)) or start.prompt_logprobs is not None
            (self._special.add if asks else self._special.discard)(start.slot)
            self._packer.start(start.slot, pages)
        assert self._state is not None
        while starts:
            size = self.programs.table.start_size(len(starts))
            packed = pack_starts(starts[:size], size, self._shapes)
            self._state = self._state._replace(slots=self.programs.get(("start", size))(self._state.slots, packed))
            starts = starts[size:]
        loads = [(start.snapshot, start.slot) for start in plan.started if start.snapshot]
        self._state = self.snapshots.load(self._state, loads)

    def _place_forced(self, plan: StepPlan) -> None:
        """Put forced tokens where chunks read them."""
        left = [(slot, start + at, token) for slot, start, tokens in plan.forced for at, token in enumerate(tokens)]
        for begin in range(0, len(left), FORCE_SIZE):
            packed = pack_forced(left[begin : begin + FORCE_SIZE], FORCE_SIZE, self._shapes)
            assert self._state is not None
            place = self.programs.get(("force", FORCE_SIZE))
            self._state = self._state._replace(slots=place(self._state.slots, packed))

    def _wanted(self, chunk: Chunk) -> Wanted:
        start = self._start_of(chunk)
        scores = start.prompt_logprobs is not None and chunk.start < len(start.prompt) - 1
        return Wanted(start.sampling.logprobs, start.prompt_logprobs if scores else None, len(start.prompt))

    def _launch(
        self, plan: StepPlan, launch: Launch, started: set[int], fused: tuple[str, int] | None
    ) -> list[Launched]:
        if fused is not None:
            return [self._verify(plan, launch, started, fused)]
        features = self._features(plan, launch)
        launch = self._packer.with_shared(launch, plan.chunks)
        # A guided plan samples all its launches together, once its masks are there.
        is_plain = not launch.prefills and not plan.guided and not any(features)
        if is_plain and (decoded := self._decode(plan, launch, started, features, plan.burst)) is not None:
            return [decoded]
        launched = []
        for offset in range(plan.burst):  # where no single program does them all
            if offset:
                rows = [index for index in launch.rows if plan.chunks[index].length > offset]
                launch = self._packer.with_shared(replace(launch, rows=rows, offset=offset), plan.chunks)
            one = self._decode(plan, launch, started, features, 1) if is_plain and plan.burst > 1 else None
            launched.append(one or self._forward(plan, launch, started, features))
        return launched

    def _decode(
        self, plan: StepPlan, launch: Launch, started: set[int], features: Features, burst: int
    ) -> Launched | None:
        found = self.programs.decode(len(launch.rows), burst, launch.shared is not None)
        if found is None:
            return None
        shape, step = found
        packed = self._packer.pack(launch, plan.chunks, started, shape)
        self._state, sampled = step(self.programs.weights, self._state, packed)
        real = sum(plan.chunks[index].length for index in launch.rows) if burst > 1 else len(launch.rows)
        self.num_padding_tokens += shape.tokens * burst - real
        sampled.tokens.copy_to_host_async()
        return Launched(launch, features, sampled=sampled, has_all_rows=True)

    def _verify(self, plan: StepPlan, launch: Launch, started: set[int], key: tuple[str, int]) -> Launched:
        packed = self._packer.pack(launch, plan.chunks, started, fused_shape(*key))
        self._state, sampled = self.programs.get(key)(self.programs.weights, self._state, packed)
        self.num_padding_tokens += key[1] - launch.num_tokens(plan.chunks)
        sampled.tokens.copy_to_host_async()
        return Launched(launch, NOTHING_ASKED, sampled=sampled)

    def _forward(self, plan: StepPlan, launch: Launch, started: set[int], features: Features) -> Launched:
        needed = launch.shape(plan.chunks)
        shape, forward = self.programs.forward(needed, launch.num_tiles(plan.chunks))
        packed = self._packer.pack(launch, plan.chunks, started, shape)
        assert self._state is not None
        state = self.programs.checked(shape, self._state)
        self._state, computed = forward(self.programs.weights, state, packed)
        self.num_padding_tokens += shape.tokens - needed.tokens
        launched = Launched(launch, features, computed)
        if not plan.guided:
            self._sample(plan, launched, {})
        return launched

    def _sample(self, plan: StepPlan, launched: Launched, masks: dict[int, bytes]) -> None:
        launch, features, computed = launched.launch, launched.features, launched.computed
        assert computed is not None
        count = num_sampling(launch, plan.chunks)
        if not all(plan.chunks[index].samples for index in launch.indices):
            computed.is_finite.copy_to_host_async()
        if not count:
            return
        assert computed.hidden is not None, "a launch samples once"
        key, sample = self.programs.sample(count, features)
        packed = self._packer.pack_samples(launch, plan.chunks, key[1], features)
        assert self._state is not None
        rows, state = self._masks(plan, launch, key[1], masks), self.programs.checked(key, self._state)
        slots, sampled = sample(self.programs.compiler.head, state.slots, computed.hidden, packed, rows)
        self._state = state._replace(slots=slots)
        sampled.tokens.copy_to_host_async()
        launched.sampled, launched.computed = sampled, computed._replace(hidden=None)

    def _features(self, plan: StepPlan, launch: Launch) -> Features:
        """The features that any row asks for."""
        chunks, special = plan.chunks, self._special
        indices = [index for index in launch.indices if chunks[index].slot in special]
        asked = [asked_by(self._start_of(chunks[index])) for index in indices]
        masks = any(index in plan.guided for index in launch.indices) if plan.guided else False
        return Features(*(any(flags) for flags in zip(NOTHING_ASKED, *asked, strict=True)))._replace(masks=masks)

    def _masks(self, plan: StepPlan, launch: Launch, size: int, masks: dict[int, bytes]) -> Any:
        if not any(index in masks for index in launch.indices):
            if size not in self._no_masks:
                masks_of_all = np.full((size, self._mask_words), 0xFFFFFFFF, np.uint32)
                self._no_masks[size] = put(masks_of_all, self.programs.compiler.whole)
            return self._no_masks[size]
        rows = np.full((size, self._mask_words), 0xFFFFFFFF, np.uint32)
        row = 0
        for index in launch.samples(plan.chunks):
            if index in masks and plan.chunks[index].samples:
                rows[row] = np.frombuffer(masks[index], np.uint32)
            row += max(1, num_samples(plan.chunks[index]))
        return rows

    def _start_of(self, chunk: Chunk) -> SlotStart:
        start = self._starts[chunk.slot]
        assert start is not None, f"slot {chunk.slot} was never started"
        return start
