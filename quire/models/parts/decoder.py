"""A decoder-only transformer; each family is one with its own choice of blocks."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from quire.models.adapters import with_adapters
from quire.models.context import PlatformOps, TokenContext
from quire.models.model import States
from quire.models.params import Param, ParamTree, params_of
from quire.models.parts.feed_forward import FeedForward
from quire.models.parts.mixer import Mixer
from quire.models.parts.norm import Norm
from quire.models.parts.rope import Rope
from quire.models.parts.temperature import QueryTemperature
from quire.ops.attention.heads import Rotation
from quire.ops.layer_spec import LayerSpec
from quire.ops.row_norms import add_and_normalise
from quire.ops.weights.products import matmul
from quire.ops.weights.rounded_rows import BlockOutput, Rows, scaled, values


@dataclass(frozen=True)
class DecoderLayer:
    """x + attention(x), then x + feed_forward(x), with a norm before or after either block where there is one.

    In place of attention there may be another `Mixer`.

    Where it `is_parallel`, x + attention(norm(x)) + feed_forward(norm(x)), with one norm for both.
    """

    attention: Mixer
    feed_forward: FeedForward
    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_feed_forward: Norm | None = None
    after_feed_forward: Norm | None = None
    residual_multiplier: float = 1.0
    is_parallel: bool = False

    def params(self) -> ParamTree:
        return params_of(
            before_attention=self.before_attention,
            attention=self.attention,
            after_attention=self.after_attention,
            before_feed_forward=self.before_feed_forward,
            feed_forward=self.feed_forward,
            after_feed_forward=self.after_feed_forward,
        )

    def __call__(
        self,
        weights: ParamTree,
        x: jax.Array,
        out: BlockOutput | None,
        rotation: Rotation | None,
        state: Any,
        ops: PlatformOps,
    ) -> tuple[jax.Array, BlockOutput, Any]:
        """x, the output of this layer, and its state. `out` is the output of the layer before.

        Outputs are added to x one block later, so that a platform can fuse the sum with the norm that follows it.
        """
        own, reader = weights["attention"], None if self.is_parallel else "qkv"
        x, normal = _next_rows(self.before_attention, weights.get("before_attention"), x, out, ops, own, reader)
        out, state = self.attention(own, normal, rotation, state, ops)
        if self.is_parallel:
            return x, scaled(out) + scaled(self.feed_forward(weights["feed_forward"], normal, ops)), state
        out = self._finished(out, self.after_attention, weights.get("after_attention"), ops)

        own, norm = weights["feed_forward"], self.before_feed_forward
        x, normal = _next_rows(norm, weights.get("before_feed_forward"), x, out, ops, own, "gate_up")
        out = self.feed_forward(own, normal, ops)
        return x, self._finished(out, self.after_feed_forward, weights.get("after_feed_forward"), ops), state

    def _finished(
        self, out: BlockOutput, norm: Norm | None, weights: ParamTree | None, ops: PlatformOps
    ) -> BlockOutput:
        """The output of a block as it is added to x."""
        if norm is not None and weights is not None:
            out = norm(weights, scaled(out), ops.norms)
        return out if self.residual_multiplier == 1.0 else scaled(out) * self.residual_multiplier


@dataclass(frozen=True)
class Decoder:
    """Implements `Model`."""

    embedding: Param  # [v, d]
    blocks: tuple[DecoderLayer, ...]
    norm: Norm
    max_positions: int
    rename: Callable[[str], str | None]
    head: Param | None = None  # [v, d]; None: the embedding is used
    position_embedding: Param | None = None  # [max_positions, d]
    embedding_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float | None = None

    @cached_property
    def _kinds(self) -> dict[Any, DecoderLayer]:
        """One layer for each distinct computation."""
        return {computation(block): block for block in self.blocks}

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(block.attention.spec for block in self.blocks)

    @property
    def depends_on_length(self) -> bool:
        return any(rope.depends_on_length for rope in self._ropes())

    def prefix_key(self, prompt_length: int) -> int:
        return max((rope.prefix_key(prompt_length) for rope in self._ropes()), default=0)

    @property
    def switch_length(self) -> int | None:
        lengths = [rope.switch_length for rope in self._ropes()]
        return min((length for length in lengths if length is not None), default=None)

    def params(self) -> ParamTree:
        ends = params_of(
            embedding=self.embedding, norm=self.norm, position_embedding=self.position_embedding, head=self.head
        )
        return {**ends, "layers": [block.params() for block in self.blocks]}

    def canonical_name(self, name: str) -> str | None:
        return self.rename(name)

    def forward(
        self, weights: ParamTree, context: TokenContext, states: States, ops: PlatformOps
    ) -> tuple[jax.Array, States]:
        x = self.embed(weights, context)
        rotations = {id(rope): rope.rotation(context.positions, context.lengths) for rope in self._ropes()}
        # Layers that compute alike are traced once.
        calls = {kind: jax.jit(partial(block, ops=ops)) for kind, block in self._kinds.items()}
        out = None
        for index, (block, layer_weights) in enumerate(zip(self.blocks, weights["layers"], strict=True)):
            rotation = rotations.get(id(block.attention.rope))
            if (adapters := context.adapters) is not None:
                stacks = adapters.layers[index]
                layer_weights = with_adapters(layer_weights, stacks, adapters.rows, ops.adapter_product)
            x, out, state = calls[computation(block)](layer_weights, x, out, rotation, states.get(index))
            states = states.put(index, state)
        return values(_next_rows(self.norm, weights["norm"], x, out, ops)[1]), states

    def embed(self, weights: ParamTree, context: TokenContext) -> jax.Array:
        """The input of the first layer [t, d]."""
        x: jax.Array = weights["embedding"].rows(context.tokens).astype(jax.tree.leaves(weights["norm"])[0].dtype)
        if self.position_embedding is not None:
            x = x + weights["position_embedding"][context.positions]
        if self.embedding_multiplier != 1.0:
            x = x * jnp.asarray(self.embedding_multiplier, x.dtype)
        return x

    def logits(self, weights: ParamTree, hidden: jax.Array) -> jax.Array:
        head = weights["embedding" if self.head is None else "head"]
        logits = matmul(hidden, head) / self.logits_divisor
        if self.logits_softcap is not None:
            logits = self.logits_softcap * jnp.tanh(logits / self.logits_softcap)
        return logits

    def for_devices(self, num_devices: int) -> "Decoder":
        """The same function with weights that so many devices can share: copies of keys, split feed-forward blocks."""
        blocks = (
            replace(
                block,
                attention=block.attention.for_devices(num_devices),
                feed_forward=block.feed_forward.for_devices(num_devices),
            )
            for block in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    def _ropes(self) -> list[Rope | QueryTemperature]:
        """The distinct ropes; most layers share one."""
        ropes = (block.attention.rope for block in self.blocks)
        return list({id(rope): rope for rope in ropes if rope is not None}.values())


def _next_rows(
    norm: Norm | None,
    weights: ParamTree | None,
    x: jax.Array,
    out: BlockOutput | None,
    ops: PlatformOps,
    readers: ParamTree | None = None,
    only_reader: str | None = None,
) -> tuple[jax.Array, Rows]:
    """x + out, and its norm where there is one, for a block with the weights `readers`: one of them alone reads it,
    where it has a weight of the name `only_reader`."""
    bound = None if norm is None or weights is None else norm.bind(weights)
    reader = None if readers is None or only_reader is None else readers.get(only_reader)
    return add_and_normalise(bound, x, out, ops.norms, ops.products, readers, reader)


def computation(part: Any) -> Any:
    """A key that blocks with the same computation share: everything but the names of their weights."""
    if isinstance(part, Param):
        return part.shape
    if isinstance(part, Rope) or not is_dataclass(part):
        return part
    kept = (field.name for field in fields(part) if field.name != "name")
    return type(part), *(computation(getattr(part, name)) for name in kept)
