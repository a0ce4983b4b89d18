"""Calls the sampler as a step does, for slots that begin as the scheduler says."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np

from quire.core.plan import SlotStart
from quire.executor.sample.sampler import Features, Sampled, sample
from quire.executor.shapes import Shapes
from quire.executor.slots import Slots, empty_slots, pack_starts, start_slots
from quire.ops.attention.step_attention import PLAIN, Kernels
from quire.request import SamplingParams

Array = np.ndarray[Any, Any]


def slot_start(sampling: SamplingParams, slot: int = 0, seed: int = 0, **changes: Any) -> SlotStart:
    fields: dict[str, Any] = {
        "sample": 0,
        "prompt": (1,),
        "generated": (),
        "min_tokens": 0,
        "end_ids": (),
        "prompt_logprobs": None,
    }
    return SlotStart(slot=slot, sampling=sampling, seed=seed, **(fields | changes))


def slots_of(starts: list[SlotStart]) -> Slots:
    # As many for every test, so that few programs are compiled.
    shapes = Shapes(num_pages=2, page_size=4, num_slots=8, max_prefill_tokens=32, max_sequence_tokens=192)
    empty = jax.device_put(empty_slots(shapes))
    return start_slots(empty, pack_starts([(start, ()) for start in starts], len(starts), shapes))


class Sampling:
    """The sampler compiled for logits of one shape. Features are on unless a test turns them off."""

    def __init__(self, kernels: Kernels = PLAIN) -> None:
        self._sample = jax.jit(partial(sample, kernels=kernels.sampling))

    def __call__(
        self,
        logits: Array,
        slots: Slots,
        rows: Any,
        positions: Any,
        masks: Array | None = None,
        off: Iterable[str] = (),
    ) -> Sampled:
        num_rows, vocab_size = logits.shape
        if masks is None:
            masks = np.full((num_rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        wanted = Features(*(np.asarray(name not in off) for name in Features._fields))
        out = self._sample(logits, slots, np.asarray(rows), np.asarray(positions), masks, wanted)
        return Sampled(*(np.asarray(part) for part in out))


sampling = Sampling()


def draws(logits: Array, params: SamplingParams, count: int, seed: int = 0) -> Array:
    """Tokens 0 to `count` of one request whose logits are always the same."""
    slots = slots_of([slot_start(params, seed=seed)])
    every = np.broadcast_to(logits, (count, len(logits)))
    plain = params.top_k == 0 and params.min_p == 0 and params.top_p == params.typical_p == 1
    # Without penalties, for which there would have to be an answer of that length.
    off = ("penalties", "adjustments", "masks", "logprobs", *["filters"] * plain)
    return np.asarray(sampling(every, slots, np.zeros(count, np.int32), np.arange(count), off=off).tokens)
