"""Loads weights from files to devices."""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from quire.errors import InvalidCheckpoint, listed
from quire.files.progress import Progress, silent
from quire.files.tensor_source import BLOCK, Array, BlockSource, TensorInfo, TensorSource
from quire.models.formats.channel_weights import channel_like, channel_weight, is_quantized
from quire.models.formats.coded_weights import coded_like, coded_weight
from quire.models.formats.quantized_source import QuantizedSource
from quire.models.model import Model
from quire.models.params import Param, ParamTree
from quire.models.parts.standard import HEAD_NAME
from quire.ops.kernels import gpu_form
from quire.ops.native import int8_product, library
from quire.ops.sharding import put
from quire.ops.weights.int8 import group, group_codes, pack, pack_codes, pack_expert_codes, pack_experts
from quire.ops.weights.weight import Weight, map_arrays, map_weights

Quantize = Literal["none", "int8", "fp8"]

# The sharding of a weight; None: JAX's default device.
Placement = Callable[[Param], jax.sharding.Sharding]

_FLOATS = ("float32", "float16", "bfloat16")


def load_weights(
    model: Model,
    source: TensorSource,
    *,
    dtype: str,
    quantize: Quantize = "none",
    placement: Placement | None = None,
    progress: Progress = silent,
) -> ParamTree:
    """The model's weights on its devices, as `dtype`, or matrices quantised. Without `quantize`, those of a quantised
    checkpoint stay as they are.

    Names, shapes and dtypes of everything are compared first, and all differences reported at once. Then one weight
    is read, joined and converted while the one before it is placed, so that the host holds at most three times the
    largest weight besides what is placed.
    """
    reader = _WeightReader(source, source.tensors(), stored_names(model, source), dtype, quantize, placement)
    params = stored_params(model, source)
    total = sum(reader.num_bytes(param) for param in leaves(params))
    done = 0
    with progress("Loading weights") as report, closing(_read_ahead(reader.read, leaves(params))) as hosts:

        def place(param: Param) -> Any:
            nonlocal done
            weight = placed(next(hosts), param, placement)
            if has_channels(param, quantize):
                weight = channel_weight(weight.values, param, quantize, placement)
            weight = for_kernels(weight, placement)
            jax.block_until_ready(weight)  # type: ignore[no-untyped-call]  # one weight in flight bounds the host's memory
            done += reader.num_bytes(param)
            report(done, total)
            return weight

        return map_params(place, params)


@dataclass(frozen=True)
class _WeightReader:
    """Reads weights of a checkpoint as the host has them before they are placed."""

    source: TensorSource
    infos: Mapping[str, TensorInfo]
    stored: Mapping[str, str]  # the checkpoint's names, by the model's
    dtype: str
    quantize: Quantize
    placement: Placement | None

    def num_bytes(self, param: Param) -> int:
        if isinstance(self.source, QuantizedSource):
            return sum(map(self.source.num_bytes, self._names(param)))
        return sum(_num_bytes(self.infos[name]) for name in self._names(param))

    def read(self, param: Param) -> Any:
        source, names = self.source, self._names(param)
        if isinstance(source, QuantizedSource) and self.quantize == "none":
            coded = coded_weight(param, source, names, self.dtype)
            if coded is not None:
                return coded
        one = param.of_expert
        if one is not None:
            return _stacked((self._read_whole(one(index)) for index in range(param.shape[0])), param)
        return self._read_whole(param)

    def _read_whole(self, param: Param) -> Any:
        """A weight, or the part of one expert, as floats or in groups of eight bits."""
        source, names = self.source, self._names(param)
        if is_grouped(param, self.quantize):
            blocks = _read_blocks(param, source, names)
            if blocks is not None:
                return quantized(blocks, param, self.placement)
        host = param.assemble([source.read(name) for name in names])
        if is_grouped(param, self.quantize):
            return quantized(host, param, self.placement)
        # A read-only array is a view of the file; a device array must not share its memory.
        copy = _shares_memory(param, self.placement) and not host.flags.writeable
        return param.plain(host.astype(jnp.dtype(param.dtype(self.dtype)), copy=copy))

    def _names(self, param: Param) -> list[str]:
        return [self.stored[tensor.name] for tensor in param.sources]


def weights_like(
    model: Model,
    source: TensorSource | None,
    *,
    dtype: str,
    quantize: Quantize = "none",
    placement: Placement | None = None,
) -> ParamTree:
    """The shapes, dtypes and places of what `load_weights` gives on devices other than one CPU."""
    stored = stored_names(model, source) if isinstance(source, QuantizedSource) else {}
    params = model.params() if source is None else stored_params(model, source)
    on_gpu = jax.default_backend() == "gpu"

    def like(param: Param) -> Any:
        weight = param.plain(jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype(dtype))))  # type: ignore[no-untyped-call]
        if has_channels(param, quantize):
            weight = channel_like(param, quantize)
        elif isinstance(source, QuantizedSource) and quantize == "none":
            weight = coded_like(param, source, [stored[one.name] for one in param.sources], dtype) or weight

        def place(array: Any, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
            where = None if placement is None else placement(replace(param, shape=array.shape, axes=axes))
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)  # type: ignore[no-untyped-call]

        made = map_arrays(place, weight, param.axes)
        return map_weights(partial(gpu_form, is_alone=placement is None), made) if on_gpu else made

    return map_params(like, params)


def is_grouped(param: Param, quantize: Quantize) -> bool:
    """True of a weight that the host quantises in groups, for CPUs."""
    is_matrix = param.num_contracted > 0 or param.is_of_experts
    return quantize == "int8" and is_matrix and jax.default_backend() == "cpu"


def has_channels(param: Param, quantize: Quantize) -> bool:
    """True of a weight that its devices quantise, with a scale for each output."""
    return quantize != "none" and is_quantized(param) and (quantize == "fp8" or jax.default_backend() != "cpu")


def quantized(host: Array, param: Param, placement: Placement | None) -> Weight:
    """In the format of the int8 product: packed for the native kernel on one device, groups elsewhere."""
    packs = placement is None and jax.default_backend() == "cpu" and int8_product.is_fast()
    if host.dtype == BLOCK:
        codes, scales = host["codes"], host["scale"]
        if packs and param.is_of_experts:
            return pack_expert_codes(codes, scales)
        return (pack_codes if packs else group_codes)(codes, scales, param.contracted)
    if packs and param.is_of_experts:
        return pack_experts(host)
    return (pack if packs else group)(host, param.contracted)


def for_kernels(weight: Any, placement: Placement | None) -> Any:
    """A weight in the form that its devices multiply; anything else as it is."""
    if jax.default_backend() == "gpu":
        return map_weights(partial(gpu_form, is_alone=placement is None), weight)
    if placement is not None or jax.default_backend() != "cpu" or not library.load():
        return weight
    return map_weights(lambda one: one.native(), weight)


def _stacked(experts: Iterable[Any], param: Param) -> Any:
    """The weight of all experts from weights [1, ...] of each. One at a time is read, so that a file's codes are in
    float for one expert only."""
    whole: list[Array] = []
    one: Any = None
    for index, one in enumerate(experts):
        arrays = jax.tree.leaves(one)
        whole = whole or [np.empty((param.shape[0], *array.shape[1:]), array.dtype) for array in arrays]
        for array, to in zip(arrays, whole, strict=True):
            to[index] = array[0]
    return jax.tree.unflatten(jax.tree.structure(one), whole).for_shape(param.shape)


def _read_blocks(param: Param, source: TensorSource, names: Sequence[str]) -> Array | None:
    """The weight in quantisation blocks, if all of its sources are stored in such."""
    is_of_several = param.is_of_experts and param.shape[0] > 1
    if not param.keeps_blocks or is_of_several or not isinstance(source, BlockSource):
        return None
    tensors = []
    for name in names:
        blocks = source.read_blocks(name)
        if blocks is None:
            return None
        tensors.append(blocks.view(f"V{BLOCK.itemsize}"))  # joined as bytes, not field by field
    return param.assemble(tensors).view(BLOCK)


def placed(host: Any, param: Param, placement: Placement | None) -> Any:
    """A weight on its devices."""

    def place(array: Array, axes: tuple[str | None, ...]) -> jax.Array:
        return put(array, None if placement is None else placement(replace(param, shape=array.shape, axes=axes)))

    return map_arrays(place, host, param.axes)


def _read_ahead(read: Callable[[Param], Any], params: Sequence[Param]) -> Generator[Any, None, None]:
    """The weights in order, each read while the caller uses the one before."""
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(read, params[0])
        for param in params[1:]:
            ready, ahead = ahead, pool.submit(read, param)
            yield ready.result()
        yield ahead.result()


def _shares_memory(param: Param, placement: Placement | None) -> bool:
    """True if a device of the weight can use host memory without a copy."""
    devices = jax.devices()[:1] if placement is None else placement(param).device_set
    return any(device.platform == "cpu" for device in devices)


def stored_names(model: Model, source: TensorSource) -> dict[str, str]:
    """The checkpoint's name of every tensor that the model declares. Raises if any does not fit.

    Allocates no weights, whatever sizes the config has.
    """
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

    params = leaves(stored_params(model, source))
    found |= _head_as_embedding(model, source, found)
    declared = {tensor.name: tensor.shape for param in params for tensor in param.sources}
    fused = {
        tensor.name: param.apart
        for param in params
        if param.apart is not None and param.is_of_experts
        for tensor in param.sources
    }
    for name, shape in declared.items():
        if name not in found:
            problems["missing"].append(f"{name} {list(shape)}")
            continue
        info = infos[found[name]]
        if info.shape != shape:
            problems["misshapen"].append(f"{name} is {list(info.shape)}, the config says {list(shape)}")
        if info.dtype not in _FLOATS and name in fused:
            alone = fused[name].sources[0].name
            problems["quantised"].append(
                f"{name} is {info.dtype}; experts that are stored in one tensor are read in {', '.join(_FLOATS)}, "
                f"quantised ones where each has its own, as {alone}"
            )
        elif info.dtype not in _FLOATS:
            problems["wrong dtype"].append(f"{name} is {info.dtype}, supported are {', '.join(_FLOATS)}")
    extra = [name for canonical, name in found.items() if canonical not in declared]
    if isinstance(source, QuantizedSource):
        extra = [name for name in extra if not source.is_zero_bias(name)]
    problems["extra"] += extra

    if any(problems.values()):
        lines = [f"{len(names)} {kind}: {listed(names)}" for kind, names in problems.items() if names]
        raise InvalidCheckpoint("the checkpoint does not fit the model: " + "; ".join(lines))
    return {name: found[name] for name in declared}


def _head_as_embedding(model: Model, source: TensorSource, found: Mapping[str, str]) -> dict[str, str]:
    """The checkpoint's name of a tied embedding that is stored as the head alone: tools that store shared memory once
    keep the first of its names."""
    params = model.params()
    name = params["embedding"].sources[0].name
    if "head" in params or name in found:
        return {}
    heads = (one for one in source.tensors() if one.endswith(HEAD_NAME) and model.canonical_name(one) is None)
    head = next(heads, None)
    return {} if head is None else {name: head}


def stored_params(model: Model, source: TensorSource) -> ParamTree:
    """The model's params, each in the form whose tensors the checkpoint has."""
    names = {canonical for name in source.tensors() if (canonical := model.canonical_name(name)) is not None}
    return map_params(lambda param: param.of(names), model.params())


def map_params(make: Callable[[Param], Any], params: ParamTree) -> ParamTree:
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
