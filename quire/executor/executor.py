"""Runs plans on JAX devices."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.core.plan import Chunk, SlotStart, StepPlan
from quire.executor.batch import Launch, Packer, sampled_rows, split
from quire.executor.buckets import Bucket
from quire.executor.pending import Launched, Pending, Wanted
from quire.executor.program_store import ProgramStore
from quire.executor.programs import START_SIZES, Programs
from quire.executor.sampler import Features
from quire.executor.shapes import Shapes
from quire.executor.slots import pack_starts
from quire.models.model import Model
from quire.models.params import ParamTree

log = logging.getLogger(__name__)

NOTHING_ASKED = Features(*[False] * len(Features._fields))


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
        specialised: bool | None = None,
    ) -> None:
        """`specialised` says whether common cases have programs of their own; None: where that pays."""
        self.platform = jax.default_backend()
        self.num_padding_tokens = 0  # computed beyond the tokens of plans, since programs have fixed shapes
        self._shapes = shapes
        self.programs = Programs(model, weights, shapes, compile_threads, mesh, store, specialised)
        self._mask_words = -(-model.vocab_size // 32)
        self._no_masks: dict[int, jax.Array] = {}
        self._devices = sorted({one for leaf in jax.tree.leaves(weights) for one in leaf.devices()}, key=str)
        self.reset()
        self.check_device()  # so that it is compiled

    @property
    def num_late(self) -> int:
        """Programs compiled while a step waited for them."""
        return self.programs.num_late

    def submit(self, plan: StepPlan) -> Pending:
        self._begin_slots(plan)
        special = [index for index, chunk in enumerate(plan.chunks) if chunk.slot in self._special]
        wanted = {index: self._wanted(plan.chunks[index]) for index in special}
        scored = {index for index, want in wanted.items() if want.prompt_logprobs is not None}
        started = {start.slot for start in plan.started}
        buckets = self._shapes.buckets
        launches = split(plan.chunks, scored, buckets.max_groups, buckets.max_scored_groups)
        pending = Pending(plan, wanted, self._sample)
        for launch in launches:
            pending.launched += self._launch(plan, launch, started)
        return pending

    def reset(self) -> None:
        self._packer = Packer(self._shapes.num_slots, self._shapes.page_size)
        self._starts: list[SlotStart | None] = [None] * self._shapes.num_slots
        self._special: set[int] = set()  # slots whose requests ask for more than a token at some temperature
        self._state = None  # frees the old pages before there are new ones
        self._state = self.programs.empty_state()

    def check_device(self) -> None:
        for device in self._devices:
            found = int(_successor(jax.device_put(41, device)))
            if found != 42:
                raise RuntimeError(f"{device} computes 41 + 1 = {found}")

    def warm_up(self) -> Iterator[float]:
        for share in self.programs.compile_all():
            if self.programs.is_specialised:
                assert self._state is not None
                self._state = self.programs.rehearse(self._state)
            yield share

    def prepare(self, num_tokens: int) -> Iterator[float]:
        """Make ready what a lone prompt of so many tokens needs, telling the share done; nothing where all is."""
        return self.programs.compile_for_one(num_tokens)

    def close(self) -> None:
        self.programs.close()
        self._state = None

    def _begin_slots(self, plan: StepPlan) -> None:
        """Put the tokens, first pages and sampling state of the slots that begin on the device."""
        if not plan.started:
            return
        first_pages = {chunk.slot: chunk.new_pages[0] for chunk in plan.chunks if chunk.new_pages}
        starts = [(start, first_pages[start.slot]) for start in plan.started]
        for start, pages in starts:
            self._starts[start.slot] = start
            asks = any(asked_by(start)) or start.prompt_logprobs is not None
            (self._special.add if asks else self._special.discard)(start.slot)
            self._packer.start(start.slot, len(pages))
        assert self._state is not None
        while starts:
            size = next((size for size in START_SIZES if size >= len(starts)), START_SIZES[-1])
            packed = pack_starts(starts[:size], size, self._shapes)
            self._state = self._state._replace(slots=self.programs.start(size)(self._state.slots, packed))
            starts = starts[size:]

    def _wanted(self, chunk: Chunk) -> Wanted:
        start = self._start_of(chunk)
        scores = start.prompt_logprobs is not None and chunk.start < len(start.prompt) - 1
        return Wanted(start.sampling.logprobs, start.prompt_logprobs if scores else None, len(start.prompt))

    def _launch(self, plan: StepPlan, launch: Launch, started: set[int]) -> list[Launched]:
        features = self._features(plan, launch)
        # A guided plan samples all its launches together, once its masks are there.
        is_plain = not launch.fills and not plan.guided and not any(features)
        if is_plain and (decoded := self._decode(plan, launch, started, features, plan.burst)) is not None:
            return [decoded]
        launched = []
        for offset in range(plan.burst):  # where no one program does them all
            if offset:
                rows = [index for index in launch.rows if plan.chunks[index].length > offset]
                launch = replace(launch, rows=rows, offset=offset)
            one = self._decode(plan, launch, started, features, 1) if is_plain and plan.burst > 1 else None
            launched.append(one or self._forward(plan, launch, started, features))
        return launched

    def _decode(
        self, plan: StepPlan, launch: Launch, started: set[int], features: Features, burst: int
    ) -> Launched | None:
        found = self.programs.decode(len(launch.rows), burst)
        if found is None:
            return None
        bucket, step = found
        packed = self._packer.pack_decodes(launch, plan.chunks, started, bucket)
        self._state, sampled = step(self.programs.weights, self._state, packed)
        sampled.tokens.copy_to_host_async()
        return Launched(launch, bucket, features, None, None, sampled)

    def _forward(self, plan: StepPlan, launch: Launch, started: set[int], features: Features) -> Launched:
        are_new = not launch.rows and all(plan.chunks[index].start == 0 for index in launch.fills)
        alone = len(launch.fills) if are_new else 0
        bucket, forward = self.programs.forward(len(launch.rows), launch.num_groups, launch.scores, alone)
        packed = self._packer.pack(launch, plan.chunks, started, bucket)
        self._state, logits, scored = forward(self.programs.weights, self._state, packed)
        launched = Launched(launch, bucket, features, logits, scored)
        if not plan.guided:
            self._sample(plan, launched, {})
        return launched

    def _sample(self, plan: StepPlan, launched: Launched, masks: dict[int, bytes]) -> None:
        launch, bucket, features = launched.launch, launched.bucket, launched.features
        sample = self.programs.sample(bucket.num_samples, features)
        packed = self._packer.pack_samples(launch, plan.chunks, bucket, features)
        assert self._state is not None
        assert launched.logits is not None, "a launch samples once"
        rows = self._masks(plan, launch, bucket, masks)
        slots, sampled = sample(self._state.slots, launched.logits, packed, rows)
        self._state = self._state._replace(slots=slots)
        sampled.tokens.copy_to_host_async()
        launched.sampled, launched.logits = sampled, None

    def _features(self, plan: StepPlan, launch: Launch) -> Features:
        """What any row asks for."""
        chunks, special = plan.chunks, self._special
        indices = [index for index in (*launch.rows, *launch.fills) if chunks[index].slot in special]
        asked = [asked_by(self._start_of(chunks[index])) for index in indices]
        masks = any(index in plan.guided for index in (*launch.rows, *launch.fills)) if plan.guided else False
        return Features(*(any(flags) for flags in zip(NOTHING_ASKED, *asked, strict=True)))._replace(masks=masks)

    def _masks(self, plan: StepPlan, launch: Launch, bucket: Bucket, masks: dict[int, bytes]) -> Any:
        size = bucket.num_samples
        if not any(index in plan.guided for index in (*launch.rows, *launch.fills)):
            if size not in self._no_masks:
                self._no_masks[size] = jnp.zeros((size, self._mask_words), jnp.uint32)
            return self._no_masks[size]
        rows = np.full((size, self._mask_words), 0xFFFFFFFF, np.uint32)
        for row, index in sampled_rows(plan.chunks, launch, bucket):
            if index in masks:
                rows[row] = np.frombuffer(masks[index], np.uint32)
        return rows

    def _start_of(self, chunk: Chunk) -> SlotStart:
        start = self._starts[chunk.slot]
        assert start is not None, f"slot {chunk.slot} was never started"
        return start


@jax.jit
def _successor(number: jax.Array) -> jax.Array:
    return number + 1


def asked_by(start: SlotStart) -> Features:
    """What a request asks for, apart from masks."""
    s = start.sampling
    return Features(
        filters=s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0 or s.typical_p < 1),
        penalties=s.repetition_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0,
        adjustments=bool(s.logit_bias) or start.min_tokens > 0,
        masks=False,
        logprobs=s.logprobs is not None,
    )
