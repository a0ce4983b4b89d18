"""The functions that are compiled: a step's tokens through the model, and the tokens that follow them.

They are two programs. The second has fewer shapes: it computes logits and samples for as many sequences as sample,
while the first has one shape for each number of tokens. On a GPU starting a program takes the host about as long as a
small model takes to compute a token, and a step of several programs would wait for the host. So decodes, and steps with
guesses, have programs that do both for sequences that ask for nothing but tokens.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from quire.executor.draft.guesses import guess_by_lookup, positions_of, with_accepted
from quire.executor.launch import Inputs, fields, num_sample_fields, num_single
from quire.executor.layer_state import PagedStates, PageLayout
from quire.executor.programs.ladder import StepShape
from quire.executor.sample.sampler import Features, Sampled, describe, sample
from quire.executor.shapes import Shapes
from quire.executor.slots import ADAPTER, MIN_LENGTH, NUM_PROMPT, Slots
from quire.models.context import Adapters, PlatformOps, TokenContext
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.ops.attention.heads import Heads
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import Kernels, step_attention
from quire.ops.layer_spec import LayerState
from quire.ops.norms import Norms
from quire.ops.pages import TILE, PageAccess, Segments, SharedPrefixes, Tiles, write_targets
from quire.ops.recurrence import RecurrentOps
from quire.ops.sampling_kernels import NONE as NO_SAMPLING_KERNELS
from quire.ops.sampling_kernels import SamplingKernels
from quire.ops.slot_access import slot_access
from quire.ops.weights.rounded_rows import Rows
from quire.ops.weights.weight import for_rows

# The programs that sample: "any" can do everything and branches on the device; the others do what their names say.
SamplingWay = Literal["any", "plain", "filtered"]
COPY_SIZES = (1, 16)  # pages that one call can copy
MAX_VERIFIED = 64  # tokens: a step of more takes longer than starting its programs
SCORED_AT_ONCE = 64  # positions whose logits over the vocabulary are in memory together


class State(NamedTuple):
    """Everything a step changes. It is donated from step to step, so that pages are written in place."""

    pages: list[Any]  # the page arrays of the layout
    slots: Slots
    slot_arrays: list[Any] = []  # noqa: RUF012  # of layers whose state belongs to a slot; replaced, never changed


class DraftParts(NamedTuple):
    """The constants of a draft model, which guesses for the served model."""

    model: Model
    layout: PageLayout  # its page arrays stand behind those of the other
    group: int  # of the other's pages: the one that keeps all positions


class Weights(NamedTuple):
    model: ParamTree
    draft: ParamTree | None = None
    adapters: list[Any] | None = None  # by layer, the stacks of adapters; None where there are none


class Compiled(NamedTuple):
    """The constants of every program."""

    model: Model
    kernels: Kernels
    shapes: Shapes
    layout: PageLayout
    draft: DraftParts | None = None


class Computed(NamedTuple):
    """The results of a forward pass, by chunk, those that sample first."""

    hidden: jax.Array | None  # [num_samples, d], after the last token; None once it was sampled from
    is_finite: jax.Array  # bool [num_samples]: a chunk with other numbers must not share its pages
    scored: Sampled | None = None  # of each token: the log-probability of the next, where the shape scores


def forward(
    compiled: Compiled, shape: StepShape, weights: Weights, state: State, packed: jax.Array
) -> tuple[State, Computed]:
    """The tokens of a launch through the model."""
    inputs = fields(packed, shape, compiled.shapes)
    state = with_new_pages(state, inputs)
    inputs = with_positions(inputs, state.slots)
    tiles = tiles_of(compiled, shape, inputs)
    state, hidden = hidden_of(compiled, shape, weights, state, inputs, tiles)
    last = hidden[inputs.ends]
    computed = Computed(last, jnp.isfinite(last).all(axis=-1))
    if shape.scores:
        scored = _score(compiled, weights.model, hidden, state.slots, inputs.slots, inputs.positions)
        computed = computed._replace(scored=scored)
    return state, computed


def decode(
    compiled: Compiled, shape: StepShape, count: int, weights: Weights, state: State, packed: jax.Array
) -> tuple[State, Sampled]:
    """The next tokens of sequences, [count, rows]: up to `count` of each, one by one.

    A row that samples none is computed all the same: it is a part of a prompt, and the token after it is known.
    """
    inputs = with_positions(fields(packed, shape, compiled.shapes), state.slots)
    slot, num_new = inputs.slots, inputs.num_new
    state = with_new_pages(state, inputs)

    def decode_one(state: State, offset: jax.Array) -> tuple[State, jax.Array]:
        positions = jnp.where(offset < jnp.maximum(num_new, 1), inputs.positions + offset, -1)
        positions = jnp.where(inputs.positions < 0, -1, positions)
        at = inputs._replace(positions=positions)
        tiles = Tiles.single(slot, positions, shared_prefixes(inputs))
        state, hidden = hidden_of(compiled, shape, weights, state, at, tiles)
        logits = compiled.model.logits(weights.model, hidden)
        kernels = compiled.kernels.sampling
        slots, sampled = next_tokens("plain", state.slots, logits, slot, positions, offset < num_new, kernels=kernels)
        return state._replace(slots=slots), sampled.tokens

    if count == 1:
        state, tokens = decode_one(state, jnp.int32(0))
        return state, Sampled(tokens[None])
    state, tokens = jax.lax.scan(decode_one, state, jnp.arange(count, dtype=jnp.int32))
    return state, Sampled(tokens)


def verify(
    compiled: Compiled, shape: StepShape, weights: Weights, state: State, packed: jax.Array
) -> tuple[State, Sampled]:
    """The tokens [tokens] after each of a step whose chunks are decodes or have guesses, which are looked up first.

    Tokens of one slot are adjacent: the last that is known, then its guesses. Every one is sampled after.
    """
    inputs = fields(packed, shape, compiled.shapes)
    slot, place = inputs.slots, jnp.arange(shape.tokens)
    is_first = (slot != jnp.roll(slot, 1)) | (place == 0)
    num_before = place - jax.lax.cummax(jnp.where(is_first, place, 0))  # guesses of the same slot
    is_guessing = (num_before == 1) & (inputs.positions >= 0)
    guessing = jnp.nonzero(is_guessing, size=max(1, shape.tokens // 2), fill_value=shape.tokens)[0]
    padding = compiled.shapes.num_slots
    guessing = jnp.append(slot, padding)[guessing]
    state = state._replace(slots=guess_by_lookup(state.slots, guessing, compiled.shapes.guesses))
    state = with_new_pages(state, inputs)
    inputs = with_positions(inputs, state.slots)
    state, hidden = hidden_of(compiled, shape, weights, state, inputs, tiles_of(compiled, shape, inputs))
    logits = compiled.model.logits(weights.model, hidden)
    kernels, samples = compiled.kernels.sampling, inputs.positions >= 0
    slots, sampled = next_tokens(
        "plain", state.slots, logits, slot, inputs.positions, samples, kernels=kernels, guesses=num_before
    )
    return state._replace(slots=slots), sampled


def tiles_of(compiled: Compiled, shape: StepShape, inputs: Inputs) -> Tiles:
    if shape.decodes_only:
        return Tiles.single(inputs.slots, inputs.positions, shared_prefixes(inputs))
    return Tiles(
        inputs.tile_slots,
        inputs.tile_starts,
        inputs.tile_lengths,
        inputs.tile_offsets,
        num_single(shape, compiled.shapes),
        shared_prefixes(inputs),
    )


def shared_prefixes(inputs: Inputs) -> SharedPrefixes | None:
    if not len(inputs.shared_slots):
        return None
    tokens = inputs.shared_tokens.reshape(-1, TILE)
    return SharedPrefixes(inputs.shared_tile_of, tokens, inputs.shared_slots, inputs.shared_lengths)


def with_positions(inputs: Inputs, slots: Slots) -> Inputs:
    """With the positions that the lengths of slots make."""
    return inputs._replace(
        positions=positions_of(inputs.positions, inputs.slots, slots),
        tile_starts=positions_of(inputs.tile_starts, inputs.tile_slots, slots),
    )


def hidden_of(
    compiled: Compiled, shape: StepShape, weights: Weights, state: State, inputs: Inputs, tiles: Tiles
) -> tuple[State, jax.Array]:
    """The output of the last layer for each token [t, d]."""
    kernels, slots, layout = compiled.kernels, state.slots, compiled.layout
    segments = Segments(inputs.fresh_offsets, inputs.fresh_lengths) if shape.fresh_sequences else None
    tokens = StepTokens(inputs.slots, inputs.positions, tiles, segments)
    norms = kernels.decode_norms if shape.decodes_only else kernels.norms
    adapters = None
    if weights.adapters is not None:
        adapters = Adapters(slots.int_params[inputs.slots, ADAPTER], weights.adapters)
    count = len(layout.specs)
    context = _context(compiled.model, slots, tokens, adapters)
    access = [_access(compiled, slots, tokens, group) for group in range(compiled.shapes.num_groups)]
    by_slot = None
    if state.slot_arrays:
        by_slot = slot_access(inputs.slots, inputs.positions, tiles, compiled.shapes.num_slots)
    states = PagedStates(layout, state.pages[:count], access, state.slot_arrays, by_slot)
    own = for_rows(weights.model, _num_real(inputs.positions))
    hidden, states = compiled.model.forward(own, context, states, _ops(kernels, norms, inputs.positions))
    state = State([*states.arrays, *state.pages[count:]], slots, [*states.slot_arrays])
    if compiled.draft is not None:
        state, _ = draft_hidden(compiled, weights, state, inputs.slots, inputs.positions, tiles, norms, segments)
    return state, hidden


class StepTokens(NamedTuple):
    """The tokens of a forward pass: their slots and positions, and the tiles and new sequences that they make."""

    slots: jax.Array
    positions: jax.Array
    tiles: Tiles
    segments: Segments | None = None


def draft_hidden(
    compiled: Compiled,
    weights: Weights,
    state: State,
    slot: jax.Array,
    positions: jax.Array,
    tiles: Tiles,
    norms: Norms,
    segments: Segments | None = None,
) -> tuple[State, jax.Array]:
    """The output of the draft's last layer for each token [t, d]."""
    draft, count = compiled.draft, len(compiled.layout.specs)
    assert draft is not None
    assert weights.draft is not None
    tokens = StepTokens(slot, positions, tiles, segments)
    access = _access(compiled, state.slots, tokens, draft.group)
    states = PagedStates(draft.layout, state.pages[count:], [access])
    context = _context(draft.model, state.slots, tokens, None)
    own = for_rows(weights.draft, _num_real(positions))
    hidden, states = draft.model.forward(own, context, states, _ops(compiled.kernels, norms, positions))
    return state._replace(pages=[*state.pages[:count], *states.arrays]), hidden


def _num_real(positions: jax.Array) -> jax.Array:
    """int32 []: the tokens up to the last that is not padding."""
    return jnp.max(jnp.where(positions >= 0, jnp.arange(1, len(positions) + 1, dtype=jnp.int32), 0))


def _context(model: Model, slots: Slots, tokens: StepTokens, adapters: Adapters | None) -> TokenContext:
    at = jnp.maximum(tokens.positions, 0)
    lengths = None
    if model.depends_on_length:
        params = slots.int_params[tokens.slots]
        lengths = jnp.maximum(jnp.maximum(params[:, NUM_PROMPT], params[:, MIN_LENGTH]), at + 1)
    return TokenContext(slots.history[tokens.slots, at], at, lengths, adapters)


def _access(compiled: Compiled, slots: Slots, tokens: StepTokens, group: int) -> PageAccess:
    table = slots.page_table[:, group]
    targets = write_targets(table, tokens.slots, tokens.positions, compiled.shapes.page_size)
    return PageAccess(targets, table, tokens.tiles, tokens.segments)


def _ops(kernels: Kernels, norms: Norms, positions: jax.Array) -> PlatformOps:
    def attend(spec: AttentionSpec, heads: Heads, state: LayerState) -> tuple[Rows, LayerState]:
        out, pages = step_attention(kernels, spec, heads, state.arrays, state.access)
        return out, state._replace(arrays=pages)

    recurrent = RecurrentOps(kernels.recurrent)
    others = kernels.adapter_product, recurrent, kernels.experts, kernels.products
    return PlatformOps(attend, norms, *others, is_real=positions >= 0)


def sample_next(
    way: SamplingWay,
    model: Model,
    size: int,
    head: ParamTree,
    slots: Slots,
    hidden: jax.Array,
    packed: jax.Array,
    masks: jax.Array | None,
    kernels: SamplingKernels = NO_SAMPLING_KERNELS,
    has_checksums: bool = False,
) -> tuple[Slots, Sampled]:
    """The tokens after the first `size` hidden vectors, also written where the next step reads them.

    `head` has the weights that logits take. `packed` holds, for each of them, its slot, its position, whether it
    samples and how many guesses are before it, then the features.
    """
    count = num_sample_fields(slots.lengths is not None)
    slot, position, samples, *guesses = packed[: count * size].reshape(count, size)
    position = positions_of(position, slot, slots)
    # Those that sample are the first. Where checksums are wanted, all rows are.
    num_rows = jnp.int32(size) if has_checksums else jnp.sum(samples > 0)
    logits = model.logits(for_rows(head, num_rows), hidden[:size])
    return next_tokens(
        way,
        slots,
        logits,
        slot,
        position,
        samples > 0,
        features=packed[count * size :],
        masks=masks,
        kernels=kernels,
        guesses=guesses[0] if guesses else None,
        has_checksums=has_checksums,
        num_rows=num_rows,
    )


def next_tokens(
    way: SamplingWay,
    slots: Slots,
    logits: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    samples: jax.Array,
    features: jax.Array | None = None,
    masks: jax.Array | None = None,
    kernels: SamplingKernels = NO_SAMPLING_KERNELS,
    guesses: jax.Array | None = None,
    has_checksums: bool = False,
    num_rows: jax.Array | None = None,
) -> tuple[Slots, Sampled]:
    if features is not None and way == "any":
        wanted = Features(*(flag > 0 for flag in features))
    else:
        wanted = Features(way == "filtered", penalties=False, adjustments=False, masks=False, logprobs=False)
    sampled = sample(
        logits,
        slots,
        slot,
        position,
        masks,
        wanted,
        branches=way == "any",
        kernels=kernels,
        has_checksums=has_checksums,
        num_rows=num_rows,
    )
    if guesses is not None:
        sampled, samples = with_accepted(sampled, samples, slots, slot, position, guesses)
    padding = slots.history.shape[0] - 1  # tokens that do not count are written there
    slot = jnp.where(samples, slot, padding)
    if slots.lengths is not None:
        slots = slots._replace(lengths=slots.lengths.at[slot].max(position + 2))
    return slots._replace(history=slots.history.at[slot, position + 1].set(sampled.tokens)), sampled


def copy_pages(pages: list[Any], packed: jax.Array) -> list[Any]:
    """Pages [:, 1] overwritten by pages [:, 0]; all are read before any is written."""
    source, target = packed.T
    copied: list[Any] = jax.tree.map(lambda array: array.at[target].set(array[source]), pages)
    return copied


def with_new_pages(state: State, inputs: Inputs) -> State:
    return with_page_entries(state, inputs.page_slots, inputs.page_groups, inputs.page_indices, inputs.pages)


def with_page_entries(state: State, slots: jax.Array, groups: jax.Array, indices: jax.Array, pages: jax.Array) -> State:
    table = state.slots.page_table.at[slots, groups, indices].set(pages)
    # The last row is that of padding: its pages stay page 0.
    return state._replace(slots=state.slots._replace(page_table=table.at[table.shape[0] - 1].set(0)))


def _score(
    compiled: Compiled, weights: ParamTree, hidden: jax.Array, slots: Slots, token_slots: Any, positions: jax.Array
) -> Sampled:
    """The log-probability of each token's successor, a few positions at a time to bound the memory of the logits."""
    following = slots.history[token_slots, jnp.minimum(positions + 1, slots.history.shape[1] - 1)]
    always = jnp.asarray(True)

    def score(part: tuple[jax.Array, jax.Array]) -> Sampled:
        return describe(compiled.model.logits(weights, part[0]), part[1], always)

    count = hidden.shape[0]
    # A library may add in another order where a product has other rows.
    size = SCORED_AT_ONCE if compiled.shapes.fixed_order else min(SCORED_AT_ONCE, count)
    missing = -count % size
    padded = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, size, hidden.shape[1])
    parts = jax.lax.map(score, (padded, jnp.pad(following, (0, missing)).reshape(-1, size)))
    scored: Sampled = jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[:count], parts)
    return scored


def head_weights(weights: ParamTree) -> ParamTree:
    """The weights outside the layers, among which are all that logits take; the compiler drops the others."""
    return {name: weight for name, weight in weights.items() if name != "layers"}
