"""Draws the next token of each row, exactly.

The common rows, greedy and plain temperature, take few passes over the logits. Everything else stands behind conditions
that are only true when a row of the step asks for it. On a CPU a kernel finds the likeliest tokens; on one GPU two
kernels draw.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.core.plan import SlotStart
from quire.executor.programs.branches import Flag, any_of, branch, where_asked
from quire.executor.sample.filters import asks_for_filters, filtered
from quire.executor.slots import (
    FREQUENCY,
    NUM_PROMPT,
    PRESENCE,
    REPETITION,
    SAMPLE,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    Slots,
)
from quire.ops.sampling_kernels import BLOCK, DrawTokens, FilterCuts, SamplingKernels
from quire.ops.sampling_kernels import NONE as NO_KERNELS
from quire.request import MAX_LOGPROBS

ROWS_AT_ONCE = 4  # that are drawn where the rest may be padding
COLDEST = 2.0**-126  # the least normal float32; what lies below counts as 0, for which a device may take it

# In place of a token.
NOT_NUMBERS = -1  # the model's logits are NaN or infinite
NOTHING_LEFT = -2  # what the request forbids or penalises leaves no finite logit


class Features(NamedTuple):
    """The features that any row of a step asks for: scalars on the device, or known when the program is compiled."""

    filters: Flag  # top-k, top-p, min-p or typical-p
    penalties: Flag
    adjustments: Flag  # logit bias, or ends that must not come yet
    masks: Flag
    logprobs: Flag


NOTHING_ASKED = Features(*[False] * len(Features._fields))


def features_of(start: SlotStart) -> Features:
    """The features that a request asks for, apart from masks."""
    s = start.sampling
    return Features(
        filters=s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0 or s.typical_p < 1),
        penalties=s.repetition_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0,
        adjustments=bool(s.logit_bias) or start.min_tokens > 0,
        masks=False,
        logprobs=s.logprobs is not None,
    )


class Sampled(NamedTuple):
    tokens: jax.Array  # int32 [r]; NOT_NUMBERS or NOTHING_LEFT where there is none
    # Zeros, or None, where no row asks for them.
    logprobs: jax.Array | None = None  # float32 [r], of the token, by the model's own distribution
    top_ids: jax.Array | None = None  # int32 [r, MAX_LOGPROBS]
    top_logprobs: jax.Array | None = None  # float32 [r, MAX_LOGPROBS]
    # uint32 [r, 3]: of the logits, of those that filters leave, and of the sums drawn by; None unless they are checked.
    checksums: jax.Array | None = None


def sample(
    logits: jax.Array,
    slots: Slots,
    rows: jax.Array,
    positions: jax.Array,
    masks: jax.Array | None,
    features: Features,
    branches: bool = True,
    kernels: SamplingKernels = NO_KERNELS,
    has_checksums: bool = False,
    num_rows: jax.Array | None = None,
) -> Sampled:
    """The tokens that follow `positions` [r] in the slots `rows` [r], from logits [r, v].

    `masks` [r, ceil(v / 32)] has a bit for each token that is allowed. Without `branches` nothing is skipped that is
    not known to be idle at compile time: on a GPU the host would wait for the device to say which way to go.
    With a kernel for the highest logits, only the first `num_rows` count.
    """
    int_params, float_params = slots.int_params[rows], slots.float_params[rows]
    index = positions + 1 - int_params[:, NUM_PROMPT]  # of the token to draw, among the generated ones

    def changed(logits: jax.Array) -> jax.Array:
        shaped = where_asked(
            features.penalties, lambda x: _penalised(x, slots, rows, positions, int_params, float_params), logits
        )
        shaped = where_asked(features.adjustments, lambda x: _adjusted(x, slots, rows, index), shaped)
        if masks is None:
            return shaped
        allowed = masks
        return where_asked(features.masks, lambda x: jnp.where(_unpacked(allowed, x.shape[1]), x, -jnp.inf), shaped)

    cuts, highest, draws = kernels
    if highest is None or has_checksums:  # rows are compared whether they count or not
        num_rows = None
    options = _DrawOptions(features.filters, branches, cuts, has_checksums, highest is not None, num_rows)
    changes = any_of((features.penalties, features.adjustments, masks is not None and features.masks))

    def choose(shaped: jax.Array, greedy: jax.Array, number: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        return _chosen(options, _Rows(shaped, greedy, number, int_params, float_params, index))

    if highest is not None:
        find = partial(highest, num_rows=num_rows)
        tokens, checksums, reach = _chosen_by_kernel(find, choose, changed, changes, logits)
    elif draws is not None and not has_checksums:
        tokens, number = _drawn_by_kernel(draws, options, changed(logits), int_params, float_params, index)
        reach, checksums = number if changes is False else _reach(logits), []
    else:
        shaped = changed(logits)
        greedy = jnp.argmax(shaped, axis=-1).astype(jnp.int32)
        tokens, checksums = choose(shaped, greedy, jnp.take_along_axis(shaped, greedy[:, None], axis=1)[:, 0])
        reach = _reach(logits)
    tokens = jnp.where(jnp.isfinite(reach), tokens, NOT_NUMBERS)
    sampled = describe(logits, tokens, features.logprobs)
    return sampled._replace(checksums=jnp.stack([_checksum(logits), *checksums], 1)) if has_checksums else sampled


def _reach(logits: jax.Array) -> jax.Array:
    """The highest of the model's own logits, not finite where one of them is NaN: what is forbidden may hide a NaN, and
    so may XLA's maximum on CPUs."""
    return jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1)


class _Rows(NamedTuple):
    """Rows to choose tokens for."""

    logits: jax.Array  # [r, v], after all changes
    greedy: jax.Array  # int32 [r]: the likeliest tokens
    highest: jax.Array  # [r]: their logits
    int_params: jax.Array
    float_params: jax.Array
    token_index: jax.Array  # [r]: of the token to draw, among the generated ones


class _DrawOptions(NamedTuple):
    filters: Flag
    branches: bool
    cuts: FilterCuts | None
    has_checksums: bool
    has_highest: bool
    num_rows: jax.Array | None  # int32 []: the first that count


def _chosen(options: _DrawOptions, rows: _Rows) -> tuple[jax.Array, list[jax.Array]]:
    """Tokens [r] and checksums."""

    def undrawn(rows: _Rows) -> tuple[jax.Array, list[jax.Array]]:
        return rows.greedy, [jnp.zeros(rows.greedy.shape, jnp.uint32)] * (2 * options.has_checksums)

    drawn = partial(_drawn if options.num_rows is None else _drawn_in_parts, options)
    is_greedy = rows.float_params[:, TEMPERATURE] < COLDEST
    tokens, checksums = jax.lax.cond(jnp.all(is_greedy), undrawn, drawn, rows) if options.branches else drawn(rows)
    return jnp.where(jnp.isfinite(rows.highest), tokens, NOTHING_LEFT), checksums


def _drawn_by_kernel(
    draws: DrawTokens,
    options: _DrawOptions,
    logits: jax.Array,
    int_params: jax.Array,
    float_params: jax.Array,
    index: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Tokens, and numbers that are finite where the highest logit is. A row that no filter changes is drawn from as it
    is, whether others have filters or not."""
    is_greedy = float_params[:, TEMPERATURE] < COLDEST
    temperature = jnp.where(is_greedy, 1.0, float_params[:, TEMPERATURE])
    asks = asks_for_filters(int_params[:, TOP_K], float_params) & ~is_greedy & options.filters

    def cut(logits: jax.Array) -> jax.Array:
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
        return jnp.where(asks[:, None], _filtered(options, scaled, int_params, float_params, asks), logits)

    logits = where_asked(options.filters, cut, logits)
    tokens, greedy, highest = draws(logits, jnp.where(asks, 1.0, temperature), uniforms(int_params, index))
    return jnp.where(jnp.isfinite(highest), jnp.where(is_greedy, greedy, tokens), NOTHING_LEFT), highest


def _drawn(options: _DrawOptions, rows: _Rows) -> tuple[jax.Array, list[jax.Array]]:
    logits, greedy, highest, int_params, float_params, index = rows
    temperature = float_params[:, TEMPERATURE]
    is_greedy = temperature < COLDEST
    # With 0 as the highest, no temperature can make the others overflow.
    scaled = (logits - highest[:, None]) / jnp.where(is_greedy, 1.0, temperature)[:, None]
    if options.has_highest and options.filters is not False:
        # The kernel skips rows that ask for nothing, which takes less time than a branch that gives logits back.
        scaled = _filtered(options, scaled, int_params, float_params, jnp.logical_and(options.filters, ~is_greedy))
    else:
        keep = partial(filtered, branches=options.branches, cuts=options.cuts)
        scaled = where_asked(options.filters, lambda x: keep(x, int_params[:, TOP_K], float_params), scaled)
    token, sums = draw(scaled, uniforms(int_params, index))
    checksums = [_checksum(scaled), _checksum(sums)] if options.has_checksums else []
    return jnp.where(is_greedy, greedy, token), checksums


def _filtered(
    options: _DrawOptions, scaled: jax.Array, int_params: jax.Array, float_params: jax.Array, asks: jax.Array
) -> jax.Array:
    """The logits, cut in the rows that ask for it."""
    top_k, floats = jnp.where(asks, int_params[:, TOP_K], 0), jnp.where(asks[:, None], float_params, 0.0)
    return filtered(scaled, top_k, floats, branches=options.branches, cuts=options.cuts)


def _drawn_in_parts(options: _DrawOptions, rows: _Rows) -> tuple[jax.Array, list[jax.Array]]:
    """A few rows at a time, so that XLA skips most of the padding. It computes each alike among any others."""
    if len(rows.greedy) <= ROWS_AT_ONCE:
        return _drawn(options, rows)
    assert options.num_rows is not None
    assert not options.has_checksums

    def draw_part(part: jax.Array, tokens: jax.Array) -> jax.Array:
        start = part * ROWS_AT_ONCE  # of the last part, it is moved back to where there are as many rows
        these = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, ROWS_AT_ONCE), rows)
        return jax.lax.dynamic_update_slice_in_dim(tokens, _drawn(options, these)[0], start, axis=0)

    num_parts = (options.num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    tokens: jax.Array = jax.lax.fori_loop(0, num_parts, draw_part, rows.greedy)
    return tokens, []


def _chosen_by_kernel(
    highest: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    choose: Callable[..., tuple[jax.Array, list[jax.Array]]],
    changed: Callable[[jax.Array], jax.Array],
    is_changed: Flag,
    logits: jax.Array,
) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """Tokens and checksums, and the highest of the model's own logits [r], or NaN.

    A branch that gives logits back copies them, so those that nothing changes are drawn from in a branch of their own.
    """

    def from_changed(logits: jax.Array) -> tuple[jax.Array, list[jax.Array], jax.Array]:
        shaped = changed(logits)
        return *choose(shaped, *highest(shaped)), highest(logits)[1]

    def from_own(logits: jax.Array) -> tuple[jax.Array, list[jax.Array], jax.Array]:
        greedy, number = highest(logits)
        return *choose(logits, greedy, number), number

    return branch(is_changed, from_changed, from_own, logits)


def _checksum(values: jax.Array) -> jax.Array:
    """Of the bits of each row [r, n]. Integers have the same sum in every order; the factors tell places apart."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    return (bits * (2 * jnp.arange(bits.shape[1], dtype=jnp.uint32) + 1)).sum(axis=-1, dtype=jnp.uint32)


def describe(logits: jax.Array, tokens: jax.Array, wanted: Flag) -> Sampled:
    """The tokens with their log-probabilities, where any are wanted."""
    rows = logits.shape[0]

    def compute(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=1)[:, 0]
        top, ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
        missing = MAX_LOGPROBS - top.shape[1]
        return chosen, jnp.pad(ids, ((0, 0), (0, missing))), jnp.pad(top, ((0, 0), (0, missing)))

    def skip(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        shape = rows, MAX_LOGPROBS
        return jnp.zeros(rows, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    if isinstance(wanted, bool):
        return Sampled(tokens, *(compute if wanted else skip)(logits))
    return Sampled(tokens, *jax.lax.cond(wanted, compute, skip, logits))


def draw(logits: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token per row by its probability, from logits [r, v] with a maximum of 0 in every row; and the running sums.

    The first of two uniform numbers [r, 2] picks a block of the vocabulary, the second a token within it: a token that
    is far less likely than one step of a float32 keeps its chance as long as its block is not.
    """
    rows, size = logits.shape
    weights = jnp.exp(logits)
    weights = jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    block, of_blocks = _pick(weights.sum(axis=-1), uniform[:, 0])
    within = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    token, of_tokens = _pick(within, uniform[:, 1])
    return (block * BLOCK + token).astype(jnp.int32), jnp.concatenate([of_blocks, of_tokens], axis=1)


def _pick(weights: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first index at which the running sum of weights [r, n] exceeds its share, never one of weight zero; and the
    running sums."""
    running = jnp.cumsum(weights, axis=-1)
    reached = (running > uniform[:, None] * running[:, -1:]) & (weights > 0)
    # Rounding can leave nothing reached; then the last that has a weight is meant.
    last = weights.shape[1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(reached.any(axis=-1), jnp.argmax(reached, axis=-1), last), running


def _penalised(
    logits: jax.Array,
    slots: Slots,
    rows: jax.Array,
    positions: jax.Array,
    int_params: jax.Array,
    float_params: jax.Array,
) -> jax.Array:
    """Repetition counts prompt and answer; frequency and presence count only the answer."""
    history = slots.history[rows]  # [r, max_tokens]
    at = jnp.arange(history.shape[1])
    known = at <= positions[:, None]
    generated = known & (at >= int_params[:, NUM_PROMPT, None])
    row = jnp.arange(logits.shape[0])[:, None]
    nothing = jnp.zeros(logits.shape, jnp.int32)
    seen = nothing.at[row, history].add(known.astype(jnp.int32)) > 0
    count = nothing.at[row, history].add(generated.astype(jnp.int32))
    repetition = float_params[:, REPETITION, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - float_params[:, FREQUENCY, None] * count - float_params[:, PRESENCE, None] * (count > 0)


def _adjusted(logits: jax.Array, slots: Slots, rows: jax.Array, index: jax.Array) -> jax.Array:
    active = index[:, None] < slots.adjusted_until[rows]
    change = jnp.where(active, slots.adjustments[rows], 0.0)
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, slots.adjusted[rows]].add(change, mode="drop")


def _unpacked(masks: jax.Array, size: int) -> jax.Array:
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(masks.shape[0], -1)[:, :size].astype(bool)


def uniforms(int_params: jax.Array, index: jax.Array) -> jax.Array:
    """Two numbers in [0, 1) for each row [r, 2].

    They depend on the request's seed, on which of its samples this is and on the index of the token, and on nothing
    else: the threefry cipher, keyed by the seed, of the other two.
    """
    from jax.extend.random import threefry2x32_p  # loads Pallas, which takes long; kept programs need neither

    words = jax.lax.bitcast_convert_type(int_params, jnp.uint32)
    high, low, sample = words[:, SEED_HIGH], words[:, SEED_LOW], words[:, SAMPLE]
    bits = threefry2x32_p.bind(high, low, sample, index.astype(jnp.uint32))  # type: ignore[no-untyped-call]
    return jnp.stack([(word >> 8).astype(jnp.float32) * jnp.float32(2**-24) for word in bits], axis=-1)
