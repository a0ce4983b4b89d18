"""What is compiled: one launch's tokens through the model, and the tokens that follow them.

They are two programs, because the second has fewer shapes than the first and takes as long to compile. Where starting
a program costs more than that, decodes have one that does both.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from quire.executor.batch import Inputs, unpack
from quire.executor.buckets import GROUP_SIZE, Bucket
from quire.executor.layer_state import PagedState, PagedStates, PageLayout
from quire.executor.sampler import Features, Sampled, describe, sample
from quire.executor.slots import NUM_PROMPT, Slots
from quire.models.context import PlatformOps, TokenContext
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.ops.attention import Attend
from quire.ops.attention_spec import AttentionSpec
from quire.ops.grouped_attention import Groups
from quire.ops.heads import Heads
from quire.ops.step_attention import FilterCuts, Kernels, Places, Segments, step_attention

# Which programs sample: any can do everything and branches on the device; the others do no more than their names say.
SamplingWay = Literal["any", "plain", "filtered"]
SCORED_AT_ONCE = 64  # positions whose logits over the vocabulary are in memory together


class State(NamedTuple):
    """Everything a step changes. It is donated from step to step, so that pages are written where they are."""

    pages: list[tuple[jax.Array, jax.Array]]  # keys and values of each layer
    slots: Slots


def forward(
    model: Model,
    kernels: Kernels,
    layout: PageLayout,
    bucket: Bucket,
    weights: ParamTree,
    state: State,
    packed: jax.Array,
) -> tuple[State, jax.Array, Sampled | None]:
    """One launch's tokens through the model.

    Gives the logits after each row and after the last token of each group, or of each sequence where they are alone,
    [bucket.num_samples, v], and where the bucket scores, the log-probability of what follows each token of the groups.
    """
    inputs = unpack(packed, bucket, layout.page_size)
    state = _with_new_pages(state, inputs, layout.page_size)
    state, hidden, positions, token_slots = _hidden(model, kernels, layout, bucket, weights, state, inputs)

    ends = _ends(inputs, bucket)
    logits = model.logits(weights, hidden[jnp.pad(ends, (0, bucket.num_samples - ends.shape[0]))])
    scored = None
    if bucket.scores:
        rows = bucket.rows
        scored = _score(model, weights, hidden[rows:], state.slots, token_slots[rows:], positions[rows:])
    return state, logits, scored


def _ends(inputs: Inputs, bucket: Bucket) -> jax.Array:
    """The tokens of a launch after which something may be sampled."""
    if bucket.alone:
        offsets, lengths = Segments.of(inputs.group_starts, inputs.group_lengths, GROUP_SIZE, bucket.alone)
        return jnp.maximum(offsets + lengths - 1, 0)
    last = bucket.rows + jnp.arange(bucket.groups) * GROUP_SIZE + jnp.maximum(inputs.group_lengths - 1, 0)
    return jnp.concatenate([jnp.arange(bucket.rows), last])


def decode(
    model: Model,
    kernels: Kernels,
    layout: PageLayout,
    bucket: Bucket,
    count: int,
    weights: ParamTree,
    state: State,
    packed: jax.Array,
) -> tuple[State, Sampled]:
    """The next tokens of rows that ask for nothing else, [count, bucket.rows]: up to `count` of each, one by one.

    `packed` holds, for each row, its slot, its position, the next page it needs and how many tokens it gets. A row that
    gets none is computed all the same: it is a part of a prompt, and the token after it is known.
    """
    row_slots, row_positions, row_pages, num_new = packed
    none = packed[0, :0]
    inputs = Inputs(row_slots, row_positions, row_pages, *[none] * 6)
    state = _with_new_pages(state, inputs, layout.page_size)

    def one(state: State, offset: jax.Array) -> tuple[State, jax.Array]:
        positions = jnp.where(offset < jnp.maximum(num_new, 1), row_positions + offset, -1)
        at = inputs._replace(row_positions=positions)
        state, hidden, _, _ = _hidden(model, kernels, layout, bucket, weights, state, at)
        logits = model.logits(weights, hidden)
        slots, sampled = _next("plain", state.slots, logits, row_slots, positions, offset < num_new)
        return state._replace(slots=slots), sampled.tokens

    if count == 1:
        state, tokens = one(state, jnp.int32(0))
        return state, Sampled(tokens[None])
    state, tokens = jax.lax.scan(one, state, jnp.arange(count, dtype=jnp.int32))
    return state, Sampled(tokens)


def _hidden(
    model: Model,
    kernels: Kernels,
    layout: PageLayout,
    bucket: Bucket,
    weights: ParamTree,
    state: State,
    inputs: Inputs,
) -> tuple[State, jax.Array, jax.Array, jax.Array]:
    """What the last layer gives for each token [t, d], with the tokens' positions and slots."""
    slots = state.slots
    offsets = jnp.arange(GROUP_SIZE)
    real = offsets < inputs.group_lengths[:, None]
    group_positions = jnp.where(real, inputs.group_starts[:, None] + offsets, -1).reshape(-1)
    positions = jnp.concatenate([inputs.row_positions, group_positions])  # [t]
    token_slots = jnp.concatenate([inputs.row_slots, jnp.repeat(inputs.group_slots, GROUP_SIZE)])
    at = jnp.maximum(positions, 0)
    tokens = slots.history[token_slots, at]
    lengths = jnp.maximum(slots.counts[token_slots, NUM_PROMPT], at + 1) if model.depends_on_length else None
    norms = kernels.norms if bucket.groups else kernels.decode_norms
    places = _places(slots, inputs, positions, token_slots, layout.page_size)
    states = PagedStates(layout, state.pages, [places])
    ops = PlatformOps(_attend(kernels, bucket.alone), norms)
    hidden, states = model.forward(weights, TokenContext(tokens, at, lengths), states, ops)
    return State(list(states.arrays), slots), hidden, positions, token_slots


def sample_next(
    way: SamplingWay,
    slots: Slots,
    logits: jax.Array,
    packed: jax.Array,
    masks: jax.Array | None,
    cuts: FilterCuts | None = None,
) -> tuple[Slots, Sampled]:
    """The tokens that follow, also written where the next step will look for them.

    `packed` holds, for each row of the logits, its slot, its position and whether its token counts, then the features.
    """
    rows = logits.shape[0]
    slot, position, counts = packed[: 3 * rows].reshape(3, rows)
    return _next(way, slots, logits, slot, position, counts > 0, packed[3 * rows :], masks, cuts)


def _next(
    way: SamplingWay,
    slots: Slots,
    logits: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    counts: jax.Array,
    asked: jax.Array | None = None,
    masks: jax.Array | None = None,
    cuts: FilterCuts | None = None,
) -> tuple[Slots, Sampled]:
    if asked is not None and way == "any":
        features = Features(*(flag > 0 for flag in asked))
    else:
        features = Features(way == "filtered", penalties=False, adjustments=False, masks=False, logprobs=False)
    sampled = sample(logits, slots, slot, position, masks, features, branches=way == "any", cuts=cuts)
    padding = slots.history.shape[0] - 1  # what does not count is written there
    history = slots.history.at[jnp.where(counts, slot, padding), position + 1].set(sampled.tokens)
    return slots._replace(history=history), sampled


def _with_new_pages(state: State, inputs: Inputs, page_size: int) -> State:
    table = state.slots.page_table
    table = table.at[inputs.page_slots, inputs.page_indices].set(inputs.pages)
    padding = table.shape[0] - 1
    slots = jnp.where(inputs.row_pages > 0, inputs.row_slots, padding)
    table = table.at[slots, -(-jnp.maximum(inputs.row_positions, 0) // page_size)].set(inputs.row_pages)
    # Whatever was written for padding, its pages are page 0.
    return state._replace(slots=state.slots._replace(page_table=table.at[padding].set(0)))


def _places(slots: Slots, inputs: Inputs, positions: jax.Array, token_slots: jax.Array, page_size: int) -> Places:
    at = jnp.maximum(positions, 0)
    page = jnp.where(positions < 0, 0, slots.page_table[token_slots, at // page_size])
    decodes = Groups(
        slots.page_table[inputs.row_slots], inputs.row_positions, (inputs.row_positions >= 0).astype(jnp.int32)
    )
    fills = Groups(slots.page_table[inputs.group_slots], inputs.group_starts, inputs.group_lengths)
    return Places(page, at % page_size, decodes, fills)


def _attend(kernels: Kernels, alone: int) -> Attend:
    def attend(spec: AttentionSpec, heads: Heads, state: PagedState) -> tuple[jax.Array, PagedState]:
        out, pages = step_attention(kernels, spec, heads, state.pages, state.access, alone)
        return out, state._replace(pages=pages)

    return attend


def _score(
    model: Model, weights: ParamTree, hidden: jax.Array, slots: Slots, token_slots: jax.Array, positions: jax.Array
) -> Sampled:
    """The log-probability of each token's successor, a few positions at a time to bound the memory of the logits."""
    following = slots.history[token_slots, jnp.minimum(positions + 1, slots.history.shape[1] - 1)]
    yes = jnp.asarray(True)

    def score(part: tuple[jax.Array, jax.Array]) -> Sampled:
        return describe(model.logits(weights, part[0]), part[1], yes)

    count = hidden.shape[0]
    size = min(SCORED_AT_ONCE, count)
    missing = -count % size
    padded = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, size, hidden.shape[1])
    parts = jax.lax.map(score, (padded, jnp.pad(following, (0, missing)).reshape(-1, size)))
    return Sampled(*(part.reshape(-1, *part.shape[2:])[:count] for part in parts))
