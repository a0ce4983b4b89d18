"""Runs plans on JAX devices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from quire.core.plan import Chunk, ForcedTokens, StepPlan
from quire.executor.adapter_arrays import digest_of
from quire.executor.draft.draft import pack_guesses
from quire.executor.host.page_copies import PageCopies
from quire.executor.host.pinned_pages import host_memory
from quire.executor.launch import Launch, Packer, launches_of
from quire.executor.pending import Extras, Launched, Pending, extras_of
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.programs import Programs
from quire.executor.sample.sampler import NOTHING_ASKED, Features
from quire.executor.slots import FORCE_SIZE, pack_forced, pack_starts
from quire.executor.step import State
from quire.ops.sharding import put
from quire.request import num_mask_words

Choice = tuple[StepShape, Callable[..., Any]]  # of a program, by the shape that it is packed for


class JaxExecutor:
    """Implements the engine's Executor. Owned by the engine thread; only compilation happens on others.

    All device state lives in `state`, which every launch consumes and replaces. Launches run in order, so a plan may
    reuse pages and slots that launches before it still use.
    """

    def __init__(self, programs: Programs, num_host_pages: int = 0) -> None:
        """`num_host_pages`: pages of host memory that plans may copy to and from, page 0 not included, where the
        programs have kinds for that."""
        compiler = programs.compiler
        self.programs = programs
        self.platform = jax.default_backend()
        self.num_padding_tokens = 0  # beyond the tokens of plans, since programs have fixed shapes
        self._shapes = compiler.shapes
        self.host_pages = host_memory(programs.host_kinds, compiler.pages, num_host_pages)
        self.copies = PageCopies(programs, self.host_pages)
        self._mask_words = num_mask_words(compiler.model.vocab_size)
        self.adapters: dict[int, list[Any]] = {}  # on the host, by number: the arrays of each
        self._no_masks: dict[int, jax.Array] = {}
        devices = {device for array in compiler.weights for device in array.devices()}
        self._devices = sorted((device for device in devices if device.process_index == jax.process_index()), key=str)
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

    @property
    def state(self) -> State:
        """The arrays that every launch consumes and replaces."""
        assert self._state is not None, "the executor is closed"
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state

    def submit(self, plan: StepPlan) -> Pending:
        self.programs.advance()
        pages, copied = self.copies.begin(self.state.pages, plan)
        self.state = self.state._replace(pages=pages)
        for load in plan.adapter_loads:
            self.programs.put_adapter(load.slot - 1, self.adapters[load.number])
        if plan.started:
            self._start_slots(plan)
        self._place_forced(plan.forced)
        extras = self._extras_of(plan.chunks) if self._extras else {}
        scored = [index for index, wishes in extras.items() if wishes.scores(plan.chunks[index])]
        verifies = self._verify_program(plan, extras)
        if plan.num_verified and verifies is None:
            self._guess(plan.verified)
        pending = Pending(plan, extras, copied, self._sample, self.copies.take_lost)
        for launch in launches_of(plan, self._shapes, scored):
            if verifies is not None:
                pending.launched.append(self._compute_and_sample(launch, verifies))
            else:
                pending.launched += self._launch(launch, _features(launch, extras, plan.guided), plan)
        self.programs.snapshots.save(self.state, plan.saves)
        return pending

    def reset(self) -> None:
        if self.programs.members is not None:
            self.programs.members.reset()
        if self.host_pages is not None:
            self.host_pages.drain()  # its pages stay
        self.copies.forget()
        self._packer = Packer(self._shapes)
        self._extras: dict[int, Extras] = {}  # by slot, where a request asks for more than tokens
        self._state = None  # frees the old pages before there are new ones
        self.programs.snapshots.clear()
        self.programs.adapters.clear()
        self._state = self.programs.compiler.empty_state()

    def add_adapter(self, number: int, adapter: Any) -> None:
        """`adapter` is as `host_adapter` makes it. Plans may load it from now on."""
        self.adapters[number] = jax.tree.leaves(adapter)

    def drop_adapter(self, number: int) -> None:
        del self.adapters[number]

    def adapter_digest(self, adapter: Any) -> str:
        return digest_of(jax.tree.leaves(adapter))

    def read_pages(self, pages: Sequence[int]) -> Callable[[], memoryview]:
        arrays, _ = self.copies.settle(self.state.pages)
        self.state = self.state._replace(pages=arrays)
        return self.copies.read(arrays, pages)

    def write_host_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        assert self.host_pages is not None, "there are no pages of the host"
        self.host_pages.write_bytes(pages, data)

    def check_device(self) -> None:
        for device in self._devices:
            computed = int(self.programs.compiler.successor(jax.device_put(np.int32(41), device)))
            if computed != 42:
                raise RuntimeError(f"{device} computes 41 + 1 = {computed}")

    def warm_up(self) -> Iterator[float]:
        """Compile all programs, and run each once where that matters, telling the share done. A caller may leave off
        when `programs.can_run_anything`; then `warm_up_more` does the rest."""
        for share in self.programs.compile_all():
            if self._shapes.specialised:
                self.state = self.programs.rehearse(self.state)
            yield share
        while self.warm_up_more() is not None:
            pass

    def warm_up_more(self) -> float | None:
        """Run a program for the first time, or time a step when all have run. Returns the seconds after which there may
        be more to do; None when nothing is left. No step is under way."""
        if not self._shapes.specialised:
            return None
        self.state, wait_s = self.programs.rehearse_one(self.state)
        if wait_s is not None:
            return wait_s
        self.state, is_timed = self.programs.measure_one(self.state)
        return 0.0 if is_timed else None

    def prepare(self, num_tokens: int) -> Iterator[float]:
        """Compile the missing programs of a single prompt of `num_tokens`, yielding the share done."""
        return self.programs.compile_for_prompt(num_tokens)

    def close(self) -> None:
        self.programs.close()
        if self.host_pages is not None:
            self.host_pages.close()
        self._state = None
        self.programs.snapshots.close()

    def _start_slots(self, plan: StepPlan) -> None:
        """Put the tokens, first pages and sampling state of the slots that start on the device."""
        first_pages = {chunk.slot: chunk.new_pages for chunk in plan.chunks}
        starts = [(start, first_pages[start.slot]) for start in plan.started]
        for start, pages in starts:
            self._packer.start(start.slot, pages)
            self._extras.pop(start.slot, None)
            if (extras := extras_of(start)) is not None:
                self._extras[start.slot] = extras
        while starts:
            size = self.programs.table.start_size(len(starts))
            packed = pack_starts(starts[:size], size, self._shapes)
            self.state = self.state._replace(slots=self.programs.get(("start", size))(self.state.slots, packed))
            starts = starts[size:]
        loads = [(start.snapshot, start.slot) for start in plan.started if start.snapshot]
        self.state = self.programs.snapshots.load(self.state, loads)

    def _place_forced(self, forced: Iterable[ForcedTokens]) -> None:
        """Put forced tokens where chunks read them."""
        places = [(slot, start + at, token) for slot, start, tokens in forced for at, token in enumerate(tokens)]
        for begin in range(0, len(places), FORCE_SIZE):
            packed = pack_forced(places[begin : begin + FORCE_SIZE], FORCE_SIZE, self._shapes)
            place = self.programs.get(("force", FORCE_SIZE))
            self.state = self.state._replace(slots=place(self.state.slots, packed))

    def _extras_of(self, chunks: Sequence[Chunk]) -> dict[int, Extras]:
        """By index: what chunks ask for beside tokens."""
        return {index: self._extras[chunk.slot] for index, chunk in enumerate(chunks) if chunk.slot in self._extras}

    def _verify_program(self, plan: StepPlan, extras: dict[int, Extras]) -> Choice | None:
        """The program that guesses for a step, computes it and samples, if there is one: for decodes and guesses of
        slots that ask for nothing but tokens."""
        if not plan.num_verified or plan.num_decodes + plan.num_verified < len(plan.chunks) or plan.guided or extras:
            return None
        return self.programs.verify(plan.num_tokens) if all(chunk.samples for chunk in plan.chunks) else None

    def _guess(self, verified: Sequence[Chunk]) -> None:
        """Put guesses behind the tokens of the slots that have them verified."""
        slots = [chunk.slot for chunk in verified]
        size = next(size for size in self.programs.catalog.guess_sizes if size >= len(slots))
        guess = self.programs.get((self.programs.catalog.guess_kind, size))
        if self.programs.compiler.has_draft:
            entries = self._packer.new_entries((chunk.slot, chunk.new_pages) for chunk in verified)
            self.state = guess(self.programs.weights, self.state, pack_guesses(slots, entries, size, self._shapes))
            return
        packed = np.full(size, self._shapes.num_slots, np.int32)
        packed[: len(slots)] = slots
        self.state = self.state._replace(slots=guess(self.state.slots, packed))

    def _launch(self, launch: Launch, features: Features, plan: StepPlan) -> list[Launched]:
        """Several where a burst has no program of its own."""
        # A guided plan samples all its launches together, once its masks are there.
        is_plain = not launch.num_prefills and not plan.guided and not any(features)
        launch = self._packer.with_shared(launch)
        if is_plain and (decodes := self._decode_program(launch, plan.burst)) is not None:
            return [self._compute_and_sample(launch, decodes, plan.burst)]
        launched = []
        for offset in range(plan.burst):
            if offset:
                launch = self._packer.with_shared(launch.next_of_burst())
            decodes = self._decode_program(launch, 1) if is_plain and plan.burst > 1 else None
            if decodes is not None:
                launched.append(self._compute_and_sample(launch, decodes))
            else:
                launched.append(self._forward(launch, features, waits=bool(plan.guided)))
        return launched

    def _decode_program(self, launch: Launch, burst: int) -> Choice | None:
        return self.programs.decode(launch.num_rows, burst, launch.shared is not None)

    def _compute_and_sample(self, launch: Launch, choice: Choice, burst: int = 1) -> Launched:
        """In one program, which does so many decodes of each row."""
        shape, step = choice
        self.state, sampled = step(self.programs.weights, self.state, self._packer.pack(launch, shape))
        num_tokens = int(launch.num_new.sum()) if burst > 1 else launch.num_tokens
        self.num_padding_tokens += shape.tokens * burst - num_tokens
        sampled.tokens.copy_to_host_async()
        return Launched(launch, NOTHING_ASKED, sampled=sampled, has_all_rows=shape.decodes_only)

    def _forward(self, launch: Launch, features: Features, waits: bool) -> Launched:
        """Compute, and then sample, unless that `waits` for masks."""
        shape, forward = self.programs.forward(launch.shape, launch.num_tiles)
        packed = self._packer.pack(launch, shape)
        state = self.programs.checked(shape, self.state)
        self.state, computed = forward(self.programs.weights, state, packed)
        self.num_padding_tokens += shape.tokens - launch.num_tokens
        launched = Launched(launch, features, computed)
        if not waits:
            self._sample(launched, {})
        return launched

    def _sample(self, launched: Launched, masks: dict[int, bytes]) -> None:
        launch, features, computed = launched.launch, launched.features, launched.computed
        assert computed is not None
        if launch.unsampled:
            computed.is_finite.copy_to_host_async()
        if not launch.sampled:
            return
        assert computed.hidden is not None, "a launch samples once"
        key, sample = self.programs.sample(len(launch.sampled), features)
        packed = self._packer.pack_samples(launch, key[1], features)
        rows, state = self._masks(launch.sampled, key[1], masks), self.programs.checked(key, self.state)
        slots, sampled = sample(self.programs.compiler.head, state.slots, computed.hidden, packed, rows)
        self.state = state._replace(slots=slots)
        sampled.tokens.copy_to_host_async()
        launched.sampled, launched.computed = sampled, computed._replace(hidden=None)

    def _masks(self, chunks: Sequence[int], size: int, masks: dict[int, bytes]) -> Any:
        """A mask for each of `size` tokens that are sampled; `chunks`: by index, those that sample them."""
        if masks.keys().isdisjoint(chunks):
            if size not in self._no_masks:
                masks_of_all = np.full((size, self._mask_words), 0xFFFFFFFF, np.uint32)
                self._no_masks[size] = put(masks_of_all, self.programs.compiler.whole)
            return self._no_masks[size]
        rows = np.full((size, self._mask_words), 0xFFFFFFFF, np.uint32)
        for row, index in enumerate(chunks):
            if index in masks:
                rows[row] = np.frombuffer(masks[index], np.uint32)
        return rows


def _features(launch: Launch, extras: dict[int, Extras], guided: Sequence[int]) -> Features:
    """The features that any chunk asks for."""
    if not extras and not guided:
        return NOTHING_ASKED
    indices = launch.indices.tolist()
    flags = [extras[index].features for index in indices if index in extras]
    features = Features(*(any(flag) for flag in zip(NOTHING_ASKED, *flags, strict=True)))
    return features._replace(masks=not set(guided).isdisjoint(indices))
