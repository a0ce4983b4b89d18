"""Weights from files to devices."""

from collections import defaultdict
from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from quire.errors import InvalidCheckpoint
from quire.files.progress import Progress, silent
from quire.files.tensor_source import TensorInfo, TensorSource
from quire.models.model import Model
from quire.models.params import Param, ParamTree

# Where a weight goes; None: JAX's default device.
Placement = Callable[[Param], jax.sharding.Sharding]

_FLOATS = ("float32", "float16", "bfloat16")


def load_weights(
    model: Model,
    source: TensorSource,
    *,
    dtype: str,
    placement: Placement | None = None,
    progress: Progress = silent,
) -> ParamTree:
    """The model's weights on its devices, as `dtype`.

    Names, shapes and dtypes of everything are compared first, and all differences reported at once. Then one weight
    at a time is read, joined, converted and placed, so that the host holds at most three times the largest weight
    besides what is placed.
    """
    stored = _stored_names(model, source)
    infos = source.tensors()

    def num_bytes(param: Param) -> int:
        return sum(_num_bytes(infos[stored[tensor.name]]) for tensor in param.sources)

    params = model.params()
    total = sum(num_bytes(param) for param in leaves(params))
    done = 0
    with progress("Loading weights") as report:

        def load(param: Param) -> jax.Array:
            nonlocal done
            names = [stored[tensor.name] for tensor in param.sources]
            weight = _load(param, source, names, dtype, placement)
            done += num_bytes(param)
            report(done, total)
            return weight

        return map_params(load, params)


def _load(param: Param, source: TensorSource, names: list[str], dtype: str, placement: Placement | None) -> jax.Array:
    host = param.assemble([source.read(name) for name in names])
    # What is read-only is a view of the file: on a CPU the device array could be the same memory, and change with it.
    host = host.astype(jnp.dtype(dtype), copy=not host.flags.writeable)
    weight: jax.Array = jax.device_put(host, None if placement is None else placement(param))
    weight.block_until_ready()  # before the next is read: one weight in flight bounds the host's memory
    return weight


def _stored_names(model: Model, source: TensorSource) -> dict[str, str]:
    """The checkpoint's name of every tensor the model declares, once all of them are known to fit."""
    infos = source.tensors()
    found: dict[str, str] = {}
    problems: dict[str, list[str]] = defaultdict(list)
    for name in infos:
        canonical = model.canonical_name(name)
        if canonical is None:
            continue
        if canonical in found:
            problems["twice"].append(f"{canonical} (as {found[canonical]} and {name})")
        found[canonical] = name

    declared = {tensor.name: tensor.shape for param in leaves(model.params()) for tensor in param.sources}
    for name, shape in declared.items():
        if name not in found:
            problems["missing"].append(f"{name} {list(shape)}")
            continue
        info = infos[found[name]]
        if info.shape != shape:
            problems["misshapen"].append(f"{name} is {list(info.shape)}, the config says {list(shape)}")
        if info.dtype not in _FLOATS:
            problems["wrong dtype"].append(f"{name} is {info.dtype}, supported are {', '.join(_FLOATS)}")
    problems["extra"] += [name for canonical, name in found.items() if canonical not in declared]

    if any(problems.values()):
        lines = [f"{len(names)} {kind}: {', '.join(names)}" for kind, names in problems.items() if names]
        raise InvalidCheckpoint("the checkpoint does not fit the model: " + "; ".join(lines))
    return {name: found[name] for name in declared}


def map_params(make: Callable[[Param], jax.Array], params: ParamTree) -> ParamTree:
    """The tree with an array for every Param, made in order."""
    weights: ParamTree = jax.tree.map(make, params, is_leaf=_is_param)
    return weights


def leaves(params: ParamTree) -> list[Param]:
    found: list[Param] = jax.tree.leaves(params, is_leaf=_is_param)
    return found


def _is_param(node: object) -> bool:
    return isinstance(node, Param)


def _num_bytes(info: TensorInfo) -> int:
    return prod(info.shape) * np.dtype(jnp.dtype(info.dtype)).itemsize
