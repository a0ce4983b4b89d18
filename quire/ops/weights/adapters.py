"""Adapters: products of small rank that are added to the products with a model's weights. Each row has its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from quire.ops.weights.deferred import FewRows, FewRowsIn
from quire.ops.weights.rounded_rows import Activation, CodeProduct, Rows, Sums, scaled, values
from quire.ops.weights.weight import Axes, Weight, flat_rows

# (length, part): so many outputs in a row come from the same one of the tensors that a weight is joined from.
Runs = tuple[tuple[int, int], ...]


@partial(jax.tree_util.register_dataclass, data_fields=["a", "b", "ranks"], meta_fields=["runs"])
@dataclass(frozen=True)
class AdapterStack:
    """The adapters of one weight, one in each slot: weight + b[s] a[s].

    A weight that is joined from several tensors has an `a` for each of them. An output belongs to one tensor, so there
    is one `b`. Adapters of a lower rank are filled up with zeros; their scales are in `b`.
    """

    a: Any  # [slots, parts, rank, *inputs]
    b: Any  # [slots, rank, *outputs]
    ranks: Any  # int32 [slots]; 0 for an adapter without this weight
    runs: Runs

    @property
    def flat(self) -> tuple[jax.Array, jax.Array]:
        """a [slots * parts * rank, inputs] and b [slots, rank, outputs]. If the reshape kept an axis of one
        tensor, XLA would copy all of `a` in every step."""
        return self.a.reshape(prod(self.a.shape[:3]), -1), self.b.reshape(*self.b.shape[:2], -1)

    @property
    def parts(self) -> int:
        """Tensors that the weight is joined from."""
        parts: int = self.a.shape[1]
        return parts

    def adapt(self, weight: Weight | None, rows: jax.Array, product: "AdapterProduct") -> Weight:
        """The weight, None where the stack has it, with the adapters that rows [t] have: 0, or a slot + 1."""
        assert weight is not None
        return AdaptedWeight(weight, self, rows, product)

    def with_adapter(self, slot: jax.Array, adapter: "AdapterStack") -> "AdapterStack":
        """With an adapter, which has no axis of slots, in a slot."""
        a, b = self.a.at[slot].set(adapter.a), self.b.at[slot].set(adapter.b)
        return AdapterStack(a, b, self.ranks.at[slot].set(adapter.ranks), self.runs)

    def like_one(self) -> "AdapterStack":
        """The shapes of one adapter."""
        return _like_one(self.parts, self.a.shape[3:], self)

    def with_weight_of(self, old: Any) -> "AdapterStack":
        """With the arrays of an old stack of this structure that a weight is in."""
        return self


@partial(jax.tree_util.register_dataclass, data_fields=["both", "b", "ranks"], meta_fields=["runs", "shape"])
@dataclass(frozen=True)
class JoinedStack:
    """The adapters of one weight, whose `a` are rows below the weight's own, those of a slot together: one product
    meets them all, for the time that it takes to read them."""

    both: Any  # [outputs + slots * parts * rank, inputs], and a few rows that make their number even
    b: Any  # [slots, rank, *outputs]
    ranks: Any  # int32 [slots]
    runs: Runs
    shape: tuple[int, ...]  # of the weight

    @property
    def flat_b(self) -> jax.Array:
        """[slots, rank, outputs]"""
        b: jax.Array = self.b.reshape(*self.b.shape[:2], -1)
        return b

    @property
    def parts(self) -> int:
        """Tensors that the weight is joined from."""
        return 1 + max(part for _, part in self.runs)

    def adapt(self, weight: Weight | None, rows: jax.Array, product: "AdapterProduct") -> Weight:
        return JoinedWeight(self, rows, product)

    def with_adapter(self, slot: jax.Array, adapter: AdapterStack) -> "JoinedStack":
        new = adapter.a.reshape(-1, self.both.shape[1])
        begin = self.flat_b.shape[2] + slot * len(new)
        both = jax.lax.dynamic_update_slice(self.both, new.astype(self.both.dtype), (begin, jnp.zeros_like(begin)))
        b, ranks = self.b.at[slot].set(adapter.b), self.ranks.at[slot].set(adapter.ranks)
        return JoinedStack(both, b, ranks, self.runs, self.shape)

    def like_one(self) -> AdapterStack:
        return _like_one(self.parts, self.shape[self.b.ndim - 2 :], self)

    def with_weight_of(self, old: Any) -> "JoinedStack":
        return replace(self, both=old.both)


def _like_one(parts: int, inputs: tuple[int, ...], stack: AdapterStack | JoinedStack) -> AdapterStack:
    _, rank, *outputs = stack.b.shape

    def like(shape: tuple[int, ...], array: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, array.dtype)  # type: ignore[no-untyped-call]

    return AdapterStack(
        like((parts, rank, *inputs), stack.b), like((rank, *outputs), stack.b), like((), stack.ranks), stack.runs
    )


Stack = AdapterStack | JoinedStack


class AdapterProduct(Protocol):
    def __call__(
        self, out: jax.Array, x: jax.Array, rows: jax.Array, stack: Stack, *, gated: bool = False
    ) -> jax.Array:
        """out [t, outputs], with the products of x [t, inputs] and the adapters of its rows [t] added.

        Row t has the adapter in slot rows[t] - 1, or none where that is 0. x that is `gated` has [t, 2, inputs]; it
        stands for silu(x[:, 0]) * x[:, 1].

        With a `JoinedStack`, out is the product of x with `both`, and x itself is not read. Where that is `gated`,
        outputs are [2, m], and silu of the first times the second is given back, [t, m].
        """


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["shape", "num_contracted"])
@dataclass(frozen=True)
class RoomyWeight(Weight):
    """A weight as a matrix, with rows of zeros below it for the `a` of adapters. Once joined with them, it is
    multiplied as a `JoinedWeight`."""

    values: Any  # [outputs + rows, inputs]
    shape: tuple[int, ...]  # of the weight itself
    num_contracted: int

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        raise NotImplementedError("a weight with room is multiplied once it is joined with its adapters")

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> Self:
        return replace(self, values=change(self.values, (None, None)))

    def join(self, stack: AdapterStack) -> tuple[None, Stack]:
        return None, JoinedStack(self.values, stack.b, stack.ranks, stack.runs, self.shape)


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "stack", "slots"], meta_fields=["add"])
@dataclass(frozen=True)
class AdaptedWeight(Weight):
    """A weight of any form, with the adapters of the rows that meet it. It is one within a step."""

    weight: Weight
    stack: AdapterStack
    slots: jax.Array  # int32 [t]: 0 for none, or a slot + 1
    add: AdapterProduct

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def num_contracted(self) -> int:
        return self.weight.num_contracted

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        return self._added_to(self.weight.product(x, dtype), values(x))

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> "AdaptedWeight":
        raise NotImplementedError("adapters are mapped with the stacks that hold them")

    def row_code_dtype(self, num_rows: int, kernel: CodeProduct | None) -> Any | None:
        return self.weight.row_code_dtype(num_rows, None)  # XLA multiplies it

    def few_row_product(self, rows: FewRowsIn, kernels: FewRows, dtype: Any) -> jax.Array | None:
        out = self.weight.few_row_product(rows, kernels, jnp.float32)
        return None if out is None else self._added_to(out, values(rows))

    def product_of_gated(self, activation: Activation, both: Sums) -> jax.Array | None:
        out = self.weight.product_of_gated(activation, both)
        return None if out is None else self._added_to(out, scaled(both)[:, 0], gated=True)

    def _added_to(self, out: jax.Array, x: jax.Array, *, gated: bool = False) -> jax.Array:
        shape = (len(x), 2, self.inputs) if gated else (len(x), self.inputs)
        return self.add(out, x.reshape(shape), self.slots, self.stack, gated=gated)


@partial(jax.tree_util.register_dataclass, data_fields=["stack", "slots"], meta_fields=["add"])
@dataclass(frozen=True)
class JoinedWeight(Weight):
    """A weight that is in the stack of its adapters, which one product meets with it. It is one within a step."""

    stack: JoinedStack
    slots: jax.Array  # int32 [t]: 0 for none, or a slot + 1
    add: AdapterProduct

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape

    @property
    def num_contracted(self) -> int:
        num_outputs: int = self.stack.b.ndim - 2
        return len(self.shape) - num_outputs

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        return self.add(self._joined_product(x, dtype), values(x), self.slots, self.stack)

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> "JoinedWeight":
        raise NotImplementedError("adapters are mapped with the stacks that hold them")

    def gated_rows(self, activation: Activation, x: Rows) -> jax.Array | None:
        if activation is not jax.nn.silu:
            return None
        return self.add(self._joined_product(x, x.dtype), values(x), self.slots, self.stack, gated=True)

    def few_row_product(self, rows: FewRowsIn, kernels: FewRows, dtype: Any) -> None:
        return None

    def _joined_product(self, x: Rows, dtype: Any) -> jax.Array:
        return jnp.einsum("ti,oi->to", flat_rows(x), self.stack.both, preferred_element_type=dtype)


def add_products(out: jax.Array, x: jax.Array, rows: jax.Array, stack: Stack, *, gated: bool = False) -> jax.Array:
    """An `AdapterProduct` in plain jnp. Every row meets every adapter and keeps the product with its own, which takes
    the time of `slots` adapters and no memory for copies of them."""
    if isinstance(stack, JoinedStack):
        b, num_outputs = stack.flat_b, stack.flat_b.shape[2]
        shape = (len(out), len(b), stack.parts, b.shape[1])
        small = out[:, num_outputs : num_outputs + prod(shape[1:])].reshape(shape).astype(jnp.float32)
        added = _expanded(out[:, :num_outputs], small, rows, b, stack.runs)
        return _gated(added.reshape(len(out), 2, -1)).astype(out.dtype) if gated else added
    if gated:
        x = _gated(x)
    a, b = stack.flat
    a = a.reshape(*stack.a.shape[:3], -1)
    wide = jnp.promote_types(x.dtype, a.dtype)
    small = jnp.einsum("ti,spri->tspr", x.astype(wide), a.astype(wide), preferred_element_type=jnp.float32)
    return _expanded(out, small, rows, b, stack.runs)


def _gated(both: jax.Array) -> jax.Array:
    """float32 [t, m] of both [t, 2, m]."""
    return jax.nn.silu(both[:, 0].astype(jnp.float32)) * both[:, 1].astype(jnp.float32)


def _expanded(out: jax.Array, small: jax.Array, rows: jax.Array, b: jax.Array, runs: Runs) -> jax.Array:
    """out [t, outputs] with the products of small [t, slots, parts, rank] and b [slots, rank, outputs] added."""
    own = rows[:, None] == jnp.arange(1, len(b) + 1)
    small = jnp.where(own[:, :, None, None], small, 0.0)
    added, first = [], 0
    for length, part in runs:
        some = b[:, :, first : first + length].astype(jnp.float32)
        added.append(jnp.einsum("tsr,sro->to", small[:, :, part], some))
        first += length
    return (out.astype(jnp.float32) + jnp.concatenate(added, axis=1)).astype(out.dtype)


def runs_of(parts: Any) -> Runs:
    """The runs of a list of parts, one for each output."""
    runs: list[tuple[int, int]] = []
    for part in parts:
        if runs and runs[-1][1] == part:
            runs[-1] = (runs[-1][0] + 1, part)
        else:
            runs.append((1, part))
    return tuple(runs)
