"""Recurrent layers over the tokens of a step: a short convolution, and a matrix that each token changes.

A token first multiplies the matrix S [key_dim, value_dim] of a head by its decay. Then it adds its key times its value,
times its rate; with the delta rule, its value less what S has for its key. Its output is S read by its query.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.layer_kind import RECURRENT, LayerKind
from quire.ops.layer_spec import LayerSpec, LayerState
from quire.ops.pages import TILE, Tiles
from quire.ops.slot_access import SlotAccess


@dataclass(frozen=True)
class RecurrentSpec(LayerSpec):
    """The constants of a layer whose state has one size, however long its sequence is.

    It has `key_heads` keys and queries, each with `group` heads of values. The state of a head is a matrix
    [key_dim, value_dim], in float32. Before that the `channels` of each key head go through a causal convolution over
    the last `taps` tokens, of which the layer keeps the inputs of all but the last. Where it `corrects` itself, what
    the matrix has for a key is taken from a value before it is added (the delta rule).
    """

    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    channels: int
    taps: int
    corrects: bool

    @property
    def kind(self) -> LayerKind:
        return RECURRENT


class Recurrence(NamedTuple):
    """The numbers of each token, all float32."""

    q: jax.Array  # [t, k, key_dim]
    k: jax.Array  # [t, k, key_dim]
    v: jax.Array  # [t, k, g, value_dim]
    decay: jax.Array  # [t, k, g]: the logarithm of the factor, so 0 or less
    rate: jax.Array  # [t, k, g]


# (x [t, k, c], weight [k, c, taps], bias [k, c], inputs, access) -> (out [t, k, c], inputs)
ConvolveKernel = Callable[[jax.Array, jax.Array, jax.Array | None, jax.Array, SlotAccess], tuple[jax.Array, jax.Array]]
# (corrects, tokens, matrices, access) -> (out [t, k, g, value_dim], matrices)
RecurKernel = Callable[[bool, Recurrence, jax.Array, SlotAccess], tuple[jax.Array, jax.Array]]
# The same of a step's single tokens, by its tiles. What it returns for other tokens may be anything.
RecurSingle = Callable[[bool, Recurrence, jax.Array, Tiles], tuple[jax.Array, jax.Array]]


class RecurrentKernels(NamedTuple):
    """The operations of a platform, on the arrays of all slots. What they return for padding may be anything."""

    convolve: ConvolveKernel
    recur: RecurKernel


class RecurrentOps(NamedTuple):
    """The operations as models call them. Without a state the tokens are those of a whole sequence.

    The arrays of a state have a row for each slot, and a last one for padding: the last inputs of the convolution
    [slots + 1, taps - 1, k, c], and the matrices, float32 [slots + 1, k, g, key_dim, value_dim].
    """

    kernels: RecurrentKernels

    def convolve(
        self, x: jax.Array, weight: jax.Array, bias: jax.Array | None, state: LayerState | None
    ) -> tuple[jax.Array, LayerState | None]:
        """The causal convolution of x [t, k, c] by weight [k, c, taps], channel by channel; float32."""
        if state is None:
            return _convolved(x, weight, bias, lambda back: _shifted(x, back)), None
        inputs, matrices = state.arrays
        out, inputs = self.kernels.convolve(x, weight, bias, inputs, state.access)
        return out, state._replace(arrays=(inputs, matrices))

    def recur(
        self, corrects: bool, tokens: Recurrence, state: LayerState | None
    ) -> tuple[jax.Array, LayerState | None]:
        """The outputs [t, k, g, value_dim]."""
        if state is None:
            return recur_one_by_one(corrects, tokens), None
        inputs, matrices = state.arrays
        out, matrices = self.kernels.recur(corrects, tokens, matrices, state.access)
        return out, state._replace(arrays=(inputs, matrices))


def convolve(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, inputs: jax.Array, access: SlotAccess
) -> tuple[jax.Array, jax.Array]:
    """A `ConvolveKernel` in plain jnp."""
    out = _convolved(x, weight, bias, lambda back: _before(x, back, inputs, access))
    return out, _last_inputs(x, inputs, access)


def _convolved(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, before: Callable[[int], jax.Array]
) -> jax.Array:
    """`before` gives the inputs so many tokens before each token."""
    taps, weight32 = weight.shape[-1], weight.astype(jnp.float32)
    out = x.astype(jnp.float32) * weight32[:, :, -1]
    for back in range(1, taps):
        out += before(back).astype(jnp.float32) * weight32[:, :, taps - 1 - back]
    return out if bias is None else out + bias.astype(jnp.float32)


def _shifted(x: jax.Array, back: int) -> jax.Array:
    return jnp.pad(x, ((back, 0), (0, 0), (0, 0)))[: len(x)]


def _before(x: jax.Array, back: int, inputs: jax.Array, access: SlotAccess) -> jax.Array:
    """[t, k, c]: the input so many tokens before each token."""
    kept, within = inputs.shape[1], access.within
    old = inputs[access.slots, jnp.clip(kept - back + within, 0, kept - 1)]
    old = jnp.where(access.is_new[:, None, None], 0, old)
    return jnp.where((within >= back)[:, None, None], _shifted(x, back), old)


def _last_inputs(x: jax.Array, inputs: jax.Array, access: SlotAccess) -> jax.Array:
    """The inputs that the next tokens of each slot need."""
    kept = inputs.shape[1]
    token = jnp.minimum(access.ends, len(x) - 1)
    slot, within, is_new = access.slots[token], access.within[token], access.is_new[token]
    rows = []
    for back in range(kept - 1, -1, -1):
        old = inputs[slot, jnp.clip(kept - back + within, 0, kept - 1)]
        old = jnp.where(is_new[:, None, None], 0, old)
        rows.append(jnp.where((within >= back)[:, None, None], x[jnp.maximum(token - back, 0)], old))
    to = jnp.where(access.ends < len(x), slot, len(inputs))  # padding is left out
    new = jnp.stack(rows, axis=1).astype(inputs.dtype)
    return inputs.at[to].set(new, mode="drop", unique_indices=True)


def recur_in_tiles(
    corrects: bool,
    tokens: Recurrence,
    matrices: jax.Array,
    access: SlotAccess,
    recur_single: RecurSingle | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A `RecurKernel` in plain jnp, or with a platform's kernel for single tokens. Tokens of prompts go by tiles, the
    tiles one after the other."""
    tiles = access.tiles
    if tiles.num_single:
        out, matrices = (recur_single or _recur_single)(corrects, tokens, matrices, tiles)
    else:
        out = jnp.zeros(tokens.v.shape, jnp.float32)
    if len(tiles) > tiles.num_single:
        out, matrices = _recur_tiles(corrects, tokens, matrices, tiles.part(tiles.num_single, len(tiles)), out)
    return out, matrices


def recur_one_by_one(corrects: bool, tokens: Recurrence) -> jax.Array:
    """The tokens of one sequence from its first on: the definition, which other implementations are compared with."""
    _, heads, group, value_dim = tokens.v.shape
    empty = jnp.zeros((heads, group, tokens.k.shape[-1], value_dim), jnp.float32)

    def step(matrices: jax.Array, token: Recurrence) -> tuple[jax.Array, jax.Array]:
        return _updated(corrects, matrices, token)

    return jax.lax.scan(step, empty, tokens)[1]


def _updated(corrects: bool, matrices: jax.Array, token: Recurrence) -> tuple[jax.Array, jax.Array]:
    """matrices [..., k, g, i, v] after one token of each, and its output [..., k, g, v]."""
    q, k = token.q[..., None, :, None], token.k[..., None, :, None]
    matrices = matrices * jnp.exp(token.decay)[..., None, None]
    value = token.v
    if corrects:
        value = value - jnp.sum(matrices * k, axis=-2)
    matrices = matrices + k * (value * token.rate[..., None])[..., None, :]
    return matrices, jnp.sum(matrices * q, axis=-2)


def _recur_single(corrects: bool, tokens: Recurrence, matrices: jax.Array, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """A `RecurSingle` in plain jnp: all rows at once."""
    count = tiles.num_single
    is_single = tiles.lengths[:count] > 0
    slots = jnp.where(is_single, tiles.slots[:count], len(matrices))  # padding is left out
    is_new = (tiles.starts[:count] <= 0) | ~is_single
    old = jnp.where(is_new[:, None, None, None, None], 0.0, matrices[jnp.minimum(slots, len(matrices) - 1)])
    new, found = _updated(corrects, old, Recurrence(*(array[:count] for array in tokens)))
    out = jnp.zeros(tokens.v.shape, jnp.float32)
    out = out.at[:count].set(jnp.where(is_single[:, None, None, None], found, 0.0))
    return out, matrices.at[slots].set(new, mode="drop", unique_indices=True)


class _Tile(NamedTuple):
    """The parts of a tile of l tokens that do not depend on the matrices before it; [..., k, g, ...]."""

    reads: jax.Array  # [l, i]: queries with the decay since the tile's begin
    scores: jax.Array  # [l, l]: queries by keys, with the decay between them
    forgets: jax.Array  # [l, i]: what a correction takes from the matrices before the tile
    values: jax.Array  # [l, v]
    keys: jax.Array  # [l, i]: with the decay up to the tile's end
    decay: jax.Array  # []: of the whole tile


def _recur_tiles(
    corrects: bool, tokens: Recurrence, matrices: jax.Array, tiles: Tiles, out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tiles of prompts. What needs no state is computed of all of them at once."""
    count = len(out)
    is_real = tiles.lengths > 0
    order = jnp.argsort(jnp.where(is_real, tiles.offsets, count))  # those of a sequence in the order of its tokens
    slots, starts, lengths, offsets = (
        array[order] for array in (tiles.slots, tiles.starts, tiles.lengths, tiles.offsets)
    )
    at = jnp.arange(TILE)
    token = offsets[:, None] + at
    is_token = at < lengths[:, None]

    def gather(array: jax.Array) -> jax.Array:
        """Zeros behind a tile's end: a token with a rate and a decay of 0 changes nothing."""
        here = is_token.reshape(*is_token.shape, *[1] * (array.ndim - 1))
        return jnp.where(here, array[jnp.where(is_token, token, 0)], 0.0)

    gathered = Recurrence(*(gather(array) for array in tokens))
    prepared = jax.vmap(lambda one: _tile(corrects, one))(gathered)

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        matrices, found = carry
        tile = _Tile(*(array[index] for array in prepared))
        old = jnp.where(starts[index] == 0, 0.0, matrices[slots[index]])
        values = tile.values
        if corrects:
            values = values - _product("kgli,kgiv->kglv", tile.forgets, old)
        read = _product("kgli,kgiv->lkgv", tile.reads, old) + _product("kglm,kgmv->lkgv", tile.scores, values)
        new = old * tile.decay[..., None, None] + _product("kgli,kglv->kgiv", tile.keys, values)
        return matrices.at[slots[index]].set(new), found.at[index].set(read)

    found = jnp.zeros((len(slots), TILE, *out.shape[1:]), jnp.float32)
    matrices, found = jax.lax.fori_loop(0, jnp.sum(is_real), step, (matrices, found))
    return out.at[jnp.where(is_token, token, count)].set(found, mode="drop"), matrices


def _tile(corrects: bool, tokens: Recurrence) -> _Tile:
    """The parts of a tile of TILE tokens of one sequence."""
    between = _decay_between(jnp.moveaxis(tokens.decay, 0, -1))  # [k, g, l, m]
    factors = jnp.exp(between)
    since_begin = jnp.exp(between[..., 0] + tokens.decay[0][..., None])  # [k, g, l]
    rate = jnp.moveaxis(tokens.rate, 0, -1)[..., None]  # [k, g, l, 1]
    k, q = (jnp.moveaxis(array, 0, 1)[:, None] for array in (tokens.k, tokens.q))  # [k, 1, l, i]
    keys = jnp.broadcast_to(k, (*factors.shape[:-1], k.shape[-1]))
    values = jnp.moveaxis(tokens.v, 0, 2) * rate
    scores = _product("kli,kmi->klm", q[:, 0], k[:, 0])[:, None] * factors
    forgets = jnp.zeros_like(keys)
    if corrects:
        own = jnp.tril(_product("kli,kmi->klm", k[:, 0], k[:, 0])[:, None] * factors, -1) * rate
        inverse = _inverse(own)
        values = _product("kglm,kgmv->kglv", inverse, values)
        forgets = _product("kglm,kgmi->kgli", inverse, keys * rate * since_begin[..., None])
    to_end = jnp.exp(between[..., -1, :])[..., None]
    return _Tile(q * since_begin[..., None], scores, forgets, values, keys * to_end, since_begin[..., -1])


def _decay_between(decay: jax.Array) -> jax.Array:
    """[..., l, m] of decay [..., l]: the sum of those after m up to l, each sum by itself; -inf where m is after l."""
    count = decay.shape[-1]
    later = jnp.tril(jnp.ones((count, count), bool), -1)
    sums = jnp.cumsum(jnp.where(later, decay[..., None], 0.0), axis=-2)
    return jnp.where(later | jnp.eye(count, dtype=bool), sums, -jnp.inf)


def _inverse(below: jax.Array) -> jax.Array:
    """The inverse of 1 + below [..., TILE, TILE], which is 0 from its diagonal on, by blocks of 1, 2, 4 and so on."""
    index = jnp.arange(TILE)
    inverse = jnp.broadcast_to(jnp.eye(TILE), below.shape)
    size = 1
    while size < TILE:
        block = index // size
        is_left = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        step = _product("kglm,kgmn->kgln", inverse, jnp.where(is_left, below, 0.0))
        inverse = inverse - _product("kglm,kgmn->kgln", step, inverse)
        size *= 2
    return inverse


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """In float32: other products of a GPU would round to ten bits."""
    return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)


PLAIN = RecurrentKernels(convolve, recur_in_tiles)
