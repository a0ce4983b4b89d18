"""The state of each slot on the device: its tokens, its page tables and how it samples."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quire.core.plan import SlotStart
from quire.executor.launch import Ints, PagesByGroup
from quire.executor.shapes import Shapes
from quire.request import MAX_ADJUSTED_TOKENS, MIN_SHARE, SamplingParams

START_SIZES = (1, 8)  # slots that one call can start
FORCE_SIZE = 64  # forced tokens that one call can place
NO_TOKEN = 2**31 - 1  # beyond any vocabulary

TEMPERATURE, TOP_P, MIN_P, TYPICAL_P, REPETITION, FREQUENCY, PRESENCE = range(7)  # columns of `float_params`
NUM_PROMPT, TOP_K, SEED_HIGH, SEED_LOW, SAMPLE, ADAPTER, MIN_LENGTH = range(7)  # columns of `int_params`


class Slots(NamedTuple):
    """One row per slot, and a last one that padding reads and writes."""

    history: jax.Array  # int32 [slots + 1, max_tokens]: its tokens, also those the host has not seen yet
    page_table: jax.Array  # int32 [slots + 1, groups, max_pages]
    int_params: jax.Array  # int32 [slots + 1, 7]
    float_params: jax.Array  # float32 [slots + 1, 7]
    adjusted: jax.Array  # int32 [slots + 1, MAX_ADJUSTED_TOKENS]: tokens; beyond the vocabulary where there is none
    adjusted_until: jax.Array  # int32: how many tokens must be generated for the adjustment to end
    adjustments: jax.Array  # float32: added to the logit
    # int32 [slots + 1]: the number of its tokens, where they are guessed: then the host does not know it in time.
    lengths: jax.Array | None = None


def empty_slots(shapes: Shapes) -> Slots:
    """On the host: on a device each shape of zeros would be compiled."""
    rows: list[Any] = [np.zeros((shapes.num_slots + 1, *a.shape[1:]), a.dtype) for a in _row_shapes(shapes)]
    rows[Slots._fields.index("adjusted")][:] = NO_TOKEN
    return Slots(*rows)


def _row_shapes(shapes: Shapes) -> list[Any]:
    table = (shapes.num_groups, shapes.table_size)
    rows: list[tuple[int, ...]] = [(shapes.history_size,), table, (7,), (7,), *[(MAX_ADJUSTED_TOKENS,)] * 3]
    dtypes = [jnp.int32, jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32, jnp.float32]
    if shapes.guesses:
        rows, dtypes = [*rows, ()], [*dtypes, jnp.int32]
    return [np.empty((0, *row), dtype) for row, dtype in zip(rows, dtypes, strict=True)]


def start_slots(slots: Slots, packed: jax.Array) -> Slots:
    """The state with what `pack_starts` packed in it."""
    numbers, begin = packed[:, 0], 1
    started = []
    for old in (array for array in slots if array is not None):
        end = begin + prod(old.shape[1:])
        new = jax.lax.bitcast_convert_type(packed[:, begin:end], old.dtype)
        started.append(old.at[numbers].set(new.reshape(-1, *old.shape[1:])))
        begin = end
    return Slots(*started)


def force_tokens(slots: Slots, packed: jax.Array) -> Slots:
    """The state with what `pack_forced` packed in it."""
    numbers, positions, tokens = packed.T
    return slots._replace(history=slots.history.at[numbers, positions].set(tokens))


def pack_forced(forced: Sequence[tuple[int, int, int]], size: int, shapes: Shapes) -> Ints:
    """Up to `size` slots, positions and the tokens that stand there. The rest go to the padding slot."""
    packed = np.zeros((size, 3), np.int32)
    packed[:, 0] = shapes.num_slots
    if forced:
        packed[: len(forced)] = forced
    return packed


def pack_starts(starts: list[tuple[SlotStart, PagesByGroup]], size: int, shapes: Shapes) -> Ints:
    """Up to `size` starts with the first pages of each: the number of a slot and its row, field by field.

    It is one array, because each transfer to a device takes its time. The rest of the rows go to the padding slot.
    """
    fields = _row_shapes(shapes)
    packed = np.zeros((size, 1 + sum(prod(row.shape[1:]) for row in fields)), np.int32)
    packed[:, 0] = shapes.num_slots
    views: list[Any] = []
    begin = 1
    for row in fields:
        width = prod(row.shape[1:])
        views.append(packed[:, begin : begin + width].view(row.dtype))
        begin += width
    rows: Any = Slots(*views)
    rows.adjusted[:] = NO_TOKEN
    for row, (start, pages) in enumerate(starts):
        packed[row, 0] = start.slot
        known = start.prompt + start.generated
        rows.history[row, : len(known)] = known
        if shapes.guesses:
            rows.lengths[row] = len(known)
        for group, its_pages in enumerate(pages):
            rows.page_table[row, group * shapes.table_size :][: len(its_pages)] = its_pages
        seed = start.seed % 2**64
        top_k = min(start.sampling.top_k, NO_TOKEN)  # more than there are keeps all
        rows.int_params[row] = np.array(
            [len(start.prompt), top_k, seed >> 32, seed & 0xFFFFFFFF, start.sample, start.adapter, start.min_length],
            np.uint32,
        ).view(np.int32)
        rows.float_params[row] = _float_params(start.sampling)
        for column, (token, until, value) in enumerate(_adjustments(start)):
            rows.adjusted[row, column] = token
            rows.adjusted_until[row, column] = until
            rows.adjustments[row, column] = value
    return packed


def _float_params(sampling: SamplingParams) -> tuple[float, ...]:
    return (
        sampling.temperature,
        max(sampling.top_p, MIN_SHARE),
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
