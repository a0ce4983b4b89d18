"""Weights and a step for tiny models."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.executor.layer_state import PagedStates, page_layout
from quire.files.tensor_source import TensorInfo
from quire.models.checkpoint import leaves
from quire.models.context import NoStates, PlatformOps, TokenContext
from quire.models.model import Model
from quire.models.params import ParamTree
from quire.ops.attention.heads import Heads
from quire.ops.attention.reference import whole_sequence
from quire.ops.attention.spec import AttentionSpec
from quire.ops.attention.step_attention import PLAIN, step_attention
from quire.ops.layer_spec import LayerState
from quire.ops.pages import PageAccess, Tiles, write_targets
from quire.ops.slot_access import slot_access
from quire.ops.weights.floats import NativeWeight, PlainWeight
from quire.ops.weights.rounded_rows import PLAIN as PLAIN_PRODUCTS
from quire.ops.weights.rounded_rows import ProductKernels
from quire.ops.weights.weight import Weight, map_weights

PAGE_SIZE = 4
CHUNK = 8  # tokens a step computes at most; the others of it are padding


def prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def named_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Always the same for a name and shape. Norms and biases are far from one and zero: leaving one out shows."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return 0.1 * values if name.endswith("bias") else 0.3 * values + 1.0
    # Small embeddings leave the last word to the layers; a tied head would only repeat the token it is given.
    gain = 0.5 if name.endswith(("embed_tokens.weight", "wte.weight")) else 2.0
    return values * np.float32(gain / math.sqrt(min(shape)))


class NamedTensors:
    """A checkpoint that holds exactly what a model declares."""

    def __init__(self, model: Model) -> None:
        self._shapes = {tensor.name: tensor.shape for param in leaves(model.params()) for tensor in param.sources}

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(shape, "float32") for name, shape in self._shapes.items()}

    def read(self, name: str) -> np.ndarray[Any, Any]:
        return named_tensor(name, self._shapes[name])


def attend_pages(spec: AttentionSpec, heads: Heads, state: LayerState) -> tuple[jax.Array, LayerState]:
    """An `Attend` by the plain kernels."""
    out, pages = step_attention(PLAIN, spec, heads, state.arrays, state.access)
    return out, state._replace(arrays=pages)


def rows_of(table: jax.Array, rows: jax.Array, positions: jax.Array, page_size: int) -> PageAccess:
    """Tokens at these positions of these rows of a page table, each read on its own."""
    return PageAccess(write_targets(table, rows, positions, page_size), table, Tiles.single(rows, positions))


def one_row(table: jax.Array, positions: jax.Array) -> PageAccess:
    """All tokens are those of one sequence."""
    return rows_of(table, jnp.zeros_like(positions), positions, PAGE_SIZE)


def one_tile(positions: jax.Array) -> Tiles:
    """All tokens but padding are one tile of a prompt."""
    length = jnp.sum(positions >= 0, dtype=jnp.int32)[None]
    zero = jnp.zeros(1, jnp.int32)
    return Tiles(zero, positions[:1], length, zero, num_single=0)


class PagedRun:
    """One sequence through the paged forward, in chunks, over scattered pages that begin as NaN."""

    def __init__(self, model: Model, weights: ParamTree, max_length: int, page_dtype: str | None = None) -> None:
        num_pages = -(-max_length // PAGE_SIZE)
        pages = np.random.default_rng(0).permutation(np.arange(1, num_pages + 1))
        self._table = jnp.asarray(pages[None], jnp.int32)
        layout = page_layout(model.layers, PAGE_SIZE, max_length, jnp.float32, max_groups=1, page_dtype=page_dtype)
        empty = layout.empty(num_pages + 1), layout.empty_slots(1)
        self._state = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), empty)
        self._length = 0
        self._weights = weights

        @jax.jit
        def step(weights: ParamTree, context: TokenContext, state: Any) -> tuple[jax.Array, Any]:
            pages, slot_arrays = state
            by_slot = slot_access(jnp.zeros_like(context.positions), context.positions, one_tile(context.positions), 1)
            states = PagedStates(layout, pages, [one_row(self._table, context.positions)], slot_arrays, by_slot)
            hidden, states = model.forward(weights, context, states, PlatformOps(attend_pages))
            return model.logits(weights, hidden), (states.arrays, states.slot_arrays)

        self._step = step

    def prefill(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """The logits after each token."""
        known = self._length + len(tokens)
        rows = [self._chunk(tokens[i : i + CHUNK], known) for i in range(0, len(tokens), CHUNK)]
        return np.concatenate(rows)

    def decode(self, token: int) -> np.ndarray[Any, Any]:
        return self._chunk([token], self._length + 1)[0]

    def generate(self, tokens: Sequence[int], count: int) -> tuple[np.ndarray[Any, Any], list[int]]:
        """The logits of the prompt, and the greedy continuation."""
        prompt_logits = self.prefill(tokens)
        generated = [int(prompt_logits[-1].argmax())]
        while len(generated) < count:
            generated.append(int(self.decode(generated[-1]).argmax()))
        return prompt_logits, generated

    def _chunk(self, tokens: Sequence[int], known: int) -> np.ndarray[Any, Any]:
        padding = CHUNK - len(tokens)
        positions = [*range(self._length, self._length + len(tokens)), *[-1] * padding]
        context = TokenContext(jnp.asarray([*tokens, *[0] * padding]), jnp.asarray(positions), jnp.full(CHUNK, known))
        logits, self._state = self._step(self._weights, context, self._state)
        self._length += len(tokens)
        return np.asarray(logits[: len(tokens)])


def whole_logits(
    model: Model, weights: ParamTree, tokens: Sequence[int], products: ProductKernels = PLAIN_PRODUCTS
) -> np.ndarray[Any, Any]:
    """The logits after each token, from the forward without pages."""

    @jax.jit
    def run(weights: ParamTree) -> jax.Array:
        count = len(tokens)
        context = TokenContext(jnp.asarray(tokens), jnp.arange(count), lengths=jnp.full(count, count))
        hidden, _ = model.forward(weights, context, NoStates(), PlatformOps(whole_sequence, products=products))
        return model.logits(weights, hidden)

    return np.asarray(run(weights))


def without_native(weights: Any) -> Any:
    """Weights that XLA multiplies in place of those of the native library."""

    def plain(weight: Weight) -> Weight:
        return PlainWeight(weight.values, weight.num_contracted) if isinstance(weight, NativeWeight) else weight

    return map_weights(plain, weights)


def relative_error(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The largest difference, in parts of the largest logit of its row."""
    return float((np.abs(got - expected).max(-1) / np.abs(expected).max(-1)).max())
