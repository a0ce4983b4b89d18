"""What the device knows of each slot."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quire.core.plan import SlotStart
from quire.executor.batch import Ints
from quire.executor.shapes import Shapes
from quire.request import MAX_ADJUSTED_TOKENS, SamplingParams

NO_TOKEN = 2**31 - 1  # beyond any vocabulary

TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, FREQUENCY, PRESENCE = range(7)  # columns of `numbers`
NUM_PROMPT, TOP_K, SEED_HIGH, SEED_LOW, SAMPLE = range(5)  # columns of `counts`


class Slots(NamedTuple):
    """One row per slot, and a last one that padding reads and writes."""

    history: jax.Array  # int32 [slots + 1, max_tokens]: its tokens, also those the host has not seen yet
    page_table: jax.Array  # int32 [slots + 1, max_pages]
    counts: jax.Array  # int32 [slots + 1, 5]
    numbers: jax.Array  # float32 [slots + 1, 7]
    adjusted: jax.Array  # int32 [slots + 1, MAX_ADJUSTED_TOKENS]: tokens; beyond the vocabulary where there is none
    adjusted_until: jax.Array  # int32: how many tokens must be generated for the adjustment to end
    adjustments: jax.Array  # float32: added to the logit


def empty_slots(shapes: Shapes) -> Slots:
    slots = Slots(*(jnp.zeros((shapes.num_slots + 1, *a.shape[1:]), a.dtype) for a in _row_shapes(shapes)))
    return slots._replace(adjusted=jnp.full_like(slots.adjusted, NO_TOKEN))


def _row_shapes(shapes: Shapes) -> list[Any]:
    widths = [shapes.history_size, shapes.table_size, 5, 7, *[MAX_ADJUSTED_TOKENS] * 3]
    dtypes = [jnp.int32, jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32, jnp.float32]
    return [np.empty((0, width), dtype) for width, dtype in zip(widths, dtypes, strict=True)]


def start_slots(slots: Slots, packed: jax.Array) -> Slots:
    """The state with what `pack_starts` packed in it."""
    numbers, begin = packed[:, 0], 1
    started = []
    for old in slots:
        end = begin + old.shape[1]
        new = jax.lax.bitcast_convert_type(packed[:, begin:end], old.dtype)
        started.append(old.at[numbers].set(new))
        begin = end
    return Slots(*started)


def pack_starts(starts: list[tuple[SlotStart, tuple[int, ...]]], size: int, shapes: Shapes) -> Ints:
    """Up to `size` starts with the first pages of each: the number of a slot and its row, field by field.

    One array, because each takes its time to get to a device. The rest of the rows go to the padding slot.
    """
    fields = _row_shapes(shapes)
    packed = np.zeros((size, 1 + sum(row.shape[1] for row in fields)), np.int32)
    packed[:, 0] = shapes.num_slots
    views: list[Any] = []
    begin = 1
    for row in fields:
        views.append(packed[:, begin : begin + row.shape[1]].view(row.dtype))
        begin += row.shape[1]
    rows: Any = Slots(*views)
    rows.adjusted[:] = NO_TOKEN
    for row, (start, pages) in enumerate(starts):
        packed[row, 0] = start.slot
        known = start.prompt + start.generated
        rows.history[row, : len(known)] = known
        rows.page_table[row, : len(pages)] = pages
        seed = start.seed % 2**64
        top_k = min(start.sampling.top_k, NO_TOKEN)  # more than there are keeps all
        rows.counts[row] = np.array(
            [len(start.prompt), top_k, seed >> 32, seed & 0xFFFFFFFF, start.sample], np.uint32
        ).view(np.int32)
        rows.numbers[row] = _numbers(start.sampling)
        for column, (token, until, value) in enumerate(_adjustments(start)):
            rows.adjusted[row, column] = token
            rows.adjusted_until[row, column] = until
            rows.adjustments[row, column] = value
    return packed


def _numbers(sampling: SamplingParams) -> tuple[float, ...]:
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.typical_p,
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )


def _adjustments(start: SlotStart) -> list[tuple[int, int, float]]:
    """(token, until, value): the biases for good, and the ends until enough tokens are there."""
    always = 2**31 - 1
    adjustments = [(token, always, bias) for token, bias in start.sampling.logit_bias.items()]
    if start.min_tokens:
        until = min(start.min_tokens, always)
        adjustments += [(token, until, -np.inf) for token in start.end_ids]
    return adjustments
