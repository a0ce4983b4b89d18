"""The adapters of a model: places on the device for a fixed number of them, and what is put there.

Both follow from the model's own `params`: each matrix of a layer can be adapted, and takes the adapters of the tensors
that it is joined from.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.errors import InvalidAdapter, listed
from quire.files.peft import LowRank, PeftAdapter, open_adapter
from quire.models.model import Model
from quire.models.params import Array, Param, ParamTree
from quire.ops.sharding import sharding
from quire.ops.weights.adapters import AdapterProduct, AdapterStack, Runs, Stack, runs_of

ROOM_UNIT = 16  # rows: products of other sizes are slow
ROOM_SHARE = 8  # a weight with room has at most one row for adapters to so many of its own
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class AdapterSizes:
    """`slots` adapters are on the device together, of at most `rank`. 0 slots: there are none at all.

    Beside quantised weights they are bfloat16, of which a step reads half as much as of float32: an adapter is a small
    part of what it is added to, and then still more precise than that.
    """

    slots: int = 0
    rank: int = 0
    dtype: str = "float32"


def adapted_layers(model: Model) -> list[ParamTree]:
    """By layer, the params that can be adapted: matrices that rows are multiplied by, experts excepted."""
    return [_adapted(layer) for layer in model.params()["layers"]]


def _adapted(tree: ParamTree) -> ParamTree:
    found = {name: part if isinstance(part, Param) else _adapted(part) for name, part in tree.items()}
    return {name: part for name, part in found.items() if not isinstance(part, Param) or part.num_contracted}


def structure(model: Model, sizes: AdapterSizes, mesh: Mesh | None) -> list[Any]:
    """By layer, a stack for each param: shapes, dtypes and places."""

    def array(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        where = None if mesh is None else sharding(shape, axes, mesh)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)  # type: ignore[no-untyped-call]

    dtype = jnp.dtype(sizes.dtype)

    def stack(param: Param) -> AdapterStack:
        at, slots, rank = len(param.shape) - param.num_contracted, sizes.slots, sizes.rank
        return AdapterStack(
            array((slots, len(param.sources), rank, *param.shape[at:]), (None,) * 3 + param.axes[at:], dtype),
            array((slots, rank, *param.shape[:at]), (None,) * 2 + param.axes[:at], dtype),
            array((slots,), (None,), jnp.int32),
            _runs(param),
        )

    return _map(stack, adapted_layers(model))


def make_room(weights: ParamTree, model: Model, sizes: AdapterSizes, share: int = ROOM_SHARE) -> None:
    """Replace weights of a tree by those with room, in place, so that there is never more than one matrix twice.

    Every product reads the rows of all slots, whatever its rows have. So it is done where they are few beside the
    weight's own, and where a form has room: plain numbers of the adapters' type.
    """
    dtype = jnp.dtype(sizes.dtype)

    def visit(params: ParamTree, tree: ParamTree) -> None:
        for name, param in params.items():
            if not isinstance(param, Param):
                visit(param, tree[name])
                continue
            added = -(-sizes.slots * len(param.sources) * sizes.rank // ROOM_UNIT) * ROOM_UNIT
            weight = tree[name]
            if added * share <= prod(weight.outputs) and (roomy := weight.with_room(added, dtype)) is not None:
                tree[name] = roomy

    for params, tree in zip(adapted_layers(model), weights["layers"], strict=True):
        visit(params, tree)


def join(weights: ParamTree, stacks: list[Any]) -> tuple[ParamTree, list[Any]]:
    """Weights without those that have room for adapters, and stacks that have these. Stacks are as in `structure`."""

    def visit(tree: ParamTree, stack: ParamTree) -> tuple[ParamTree, ParamTree]:
        left, joined = dict(tree), dict(stack)
        for name, part in stack.items():
            weight = tree[name]
            left[name], joined[name] = visit(weight, part) if isinstance(part, dict) else weight.join(part)
        return left, joined

    layers = [visit(*pair) for pair in zip(weights["layers"], stacks, strict=True)]
    return {**weights, "layers": [left for left, _ in layers]}, [joined for _, joined in layers]


def num_bytes(model: Model, sizes: AdapterSizes, mesh: Mesh | None) -> int:
    """Bytes of all adapter slots on one device."""

    def of_one(array: jax.ShapeDtypeStruct) -> int:
        shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
        return int(prod(shape) * array.dtype.itemsize)

    return sum(of_one(array) for array in jax.tree.leaves(structure(model, sizes, mesh)))


def empty(stacks: list[Any]) -> list[Any]:
    """Stacks of this structure, without any adapter. Arrays that are there already stay as they are."""

    def made(one: Any) -> Any:
        return one if isinstance(one, jax.Array) else jax.device_put(np.zeros(one.shape, one.dtype), one.sharding)

    arrays: list[Any] = jax.tree.map(made, stacks)
    return arrays


def without_adapters(stacks: list[Any], old: list[Any]) -> list[Any]:
    """The structure of stacks, with the arrays of old ones that weights are in. These keep the `a` of old adapters,
    which no row has until its slot is written again."""

    return _by_stack(lambda stack, old: stack.with_weight_of(old), stacks, old)


def put(stacks: list[Any], slot: jax.Array, adapter: list[Any]) -> list[Any]:
    """The stacks with an adapter, as `host_adapter` makes it, in a slot."""
    return _by_stack(lambda stack, new: stack.with_adapter(slot, new), stacks, adapter)


def one_adapter(stacks: list[Any]) -> list[Any]:
    """The structure of what `host_adapter` makes for stacks of this structure."""

    return _by_stack(lambda stack: stack.like_one(), stacks)


def _by_stack(function: Any, *trees: list[Any]) -> list[Any]:
    made: list[Any] = jax.tree.map(function, *trees, is_leaf=lambda node: isinstance(node, Stack))
    return made


def with_adapters(weights: ParamTree, stacks: Any, rows: jax.Array, product: AdapterProduct) -> ParamTree:
    """The weights of a layer, each with the adapters that rows [t] have."""
    adapted = dict(weights)
    for name, stack in stacks.items():
        adapted[name] = (
            with_adapters(weights[name], stack, rows, product)
            if isinstance(stack, dict)
            else stack.adapt(weights[name], rows, product)
        )
    return adapted


def host_adapter(model: Model, adapter: PeftAdapter, rank: int, dtype: Any) -> list[Any]:
    """The arrays of one adapter on the host, filled up to `rank`: those of `structure` without their first axis.

    Raises `InvalidAdapter` for an adapter of another model.
    """
    changes = _by_tensor(model, adapter)
    if adapter.rank > rank:
        raise InvalidAdapter(f"{adapter.folder}: it has rank {adapter.rank}; max_lora_rank is {rank}")

    def stack(param: Param) -> AdapterStack:
        at = len(param.shape) - param.num_contracted
        a = np.zeros((len(param.sources), rank, *param.shape[at:]), np.float32)
        columns, own_rank = [], 0
        for part, tensor in enumerate(param.sources):
            column = np.zeros((_size(param, tensor.shape)[1], rank), np.float32)
            if (change := changes.get(tensor.name)) is not None:
                a[part, : change.rank] = adapter.read(change.a).reshape(-1, *param.shape[at:])
                column[:, : change.rank] = adapter.read(change.b) * np.float32(change.scale)
                own_rank = max(own_rank, change.rank)
            columns.append(column)
        b = np.ascontiguousarray(np.moveaxis(_joined(param, columns), -1, 0))
        return AdapterStack(a.astype(dtype), b.astype(dtype), np.array(own_rank, np.int32), _runs(param))

    made = _map(stack, adapted_layers(model))
    if not all(np.isfinite(np.asarray(array, np.float32)).all() for array in jax.tree.leaves(made)):
        raise InvalidAdapter(f"{adapter.folder}: it has numbers that are not finite in {jnp.dtype(dtype).name}")
    return made


@dataclass(frozen=True)
class AdapterReader:
    """Reads the adapters of a model from their folders. Any thread may call it."""

    model: Model
    rank: int
    dtype: Any

    def __call__(self, folder: str) -> list[Any]:
        return host_adapter(self.model, open_adapter(folder), self.rank, self.dtype)


def check_adapter(model: Model, adapter: PeftAdapter) -> None:
    """Raise `InvalidAdapter` if it does not fit the model, by the names and shapes of its tensors."""
    _by_tensor(model, adapter)


def _by_tensor(model: Model, adapter: PeftAdapter) -> dict[str, LowRank]:
    """The changes by the name of the tensor that they change."""
    adapted = {tensor.name: param for param in _params(adapted_layers(model)) for tensor in param.sources}
    shapes = {tensor.name: tensor.shape for param in adapted.values() for tensor in param.sources}
    others = {tensor.name for param in _params(model.params()) for tensor in param.sources} - adapted.keys()
    infos, problems = adapter.source.tensors(), []
    changes: dict[str, LowRank] = {}
    for module, change in adapter.modules.items():
        name = model.canonical_name(f"{module}.weight")
        if name is None or name not in adapted:
            kind = "is not adapted here: layers are, apart from norms and experts" if name in others else "is unknown"
            problems.append(f"{change.a}: {module} {kind}")
            continue
        inputs, outputs = _size(adapted[name], shapes[name])
        for stored, wanted in ((change.a, (change.rank, inputs)), (change.b, (outputs, change.rank))):
            info = infos[stored]
            if info.shape != wanted:
                problems.append(f"{stored} is {list(info.shape)}; the model has {list(wanted)}")
            elif info.dtype not in _FLOATS:
                problems.append(f"{stored} is {info.dtype}; supported are {', '.join(_FLOATS)}")
        if name in changes:
            problems.append(f"{change.a}: {module} is the module that {changes[name].a} changes, by another name")
        changes[name] = change
    if problems:
        raise InvalidAdapter(f"{adapter.folder}: the adapter does not fit the model: {listed(problems, '; ')}")
    return changes


def _size(param: Param, shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of a tensor that the param is joined from."""
    return (shape[0], shape[1]) if param.transposes else (shape[1], shape[0])


def _joined(param: Param, columns: list[Array]) -> Array:
    """Rows [outputs of the tensor, n] of each tensor, put together as those of the tensors are: [*outputs, n]."""
    tensors = [column.T if param.transposes else column for column in columns]
    joined = tensors[0] if param.join is None else param.join(tensors)
    return joined.reshape(*param.shape[: len(param.shape) - param.num_contracted], columns[0].shape[1])


def _runs(param: Param) -> Runs:
    parts = [np.full((_size(param, tensor.shape)[1], 1), part, np.int64) for part, tensor in enumerate(param.sources)]
    return runs_of(_joined(param, parts).reshape(-1).tolist())


def _params(tree: Any) -> list[Param]:
    found: list[Param] = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Param))
    return found


def _map(make: Any, tree: Any) -> list[Any]:
    made: list[Any] = jax.tree.map(make, tree, is_leaf=lambda node: isinstance(node, Param))
    return made
