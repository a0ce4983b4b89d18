"""Weights of a model from the matrices of a quantised checkpoint, joined without widening them."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from quire.errors import UnsupportedModel
from quire.models.formats.format import Array
from quire.models.formats.layout import Layout, struct
from quire.models.formats.quantized_source import QuantizedSource
from quire.models.params import Param
from quire.ops.weights.floats import PlainWeight
from quire.ops.weights.parts import Parts
from quire.ops.weights.weight import Weight


def coded_weight(param: Param, source: QuantizedSource, names: Sequence[str], dtype: str) -> Weight | None:
    """On the host; `names` are those of its sources in the checkpoint. None if none of them is quantised.

    What stays in float is of `dtype`.
    """
    layouts = _layouts(param, source, names)
    if layouts is None:
        return None
    tensors = {name: source.read_coded(name) for name, layout in zip(names, layouts, strict=True) if layout is not None}
    if (layout := _common_layout(param, source, names, layouts)) is not None:
        return layout.joined(param, [tensors[name] for name in names])
    parts = [
        PlainWeight(np.asarray(source.read(name)).astype(jnp.dtype(dtype)))
        if layout is None
        else layout.joined(_alone(param, index), [tensors[name]])
        for index, (name, layout) in enumerate(zip(names, layouts, strict=True))
    ]
    return Parts(tuple(parts), _order(param), param.shape, param.contracted)


def coded_like(param: Param, source: QuantizedSource, names: Sequence[str], dtype: str) -> Weight | None:
    """The shapes and dtypes of the weight that `coded_weight` makes."""
    layouts = _layouts(param, source, names)
    if layouts is None:
        return None
    if (layout := _common_layout(param, source, names, layouts)) is not None:
        return layout.like(param)
    parts = [
        PlainWeight(struct(tensor.shape, dtype)) if layout is None else layout.like(_alone(param, index))
        for index, (tensor, layout) in enumerate(zip(param.sources, layouts, strict=True))
    ]
    return Parts(tuple(parts), struct((len(_order(param)),), "int32"), param.shape, param.contracted)


def _layouts(param: Param, source: QuantizedSource, names: Sequence[str]) -> list[Layout | None] | None:
    """The layout of each source, None if it is float; None if all are."""
    found = [source.layout(name) for name in names]
    if param.is_widened or not any(found):
        return None
    if param.transposes:
        raise UnsupportedModel(f"{names[0]} is quantised: this family stores its matrices transposed")
    if param.shape[-1] % 2 and any(layout is not None and layout[1].bits == 4 for layout in found):
        raise UnsupportedModel(f"{names[0]} has four bits and an odd number of inputs, {param.shape[-1]}, in a head")
    layouts = [None if layout is None else layout[1] for layout in found]
    has_index = param.is_of_experts and any(layout is not None and layout.has_index for layout in layouts)
    return [replace(layout, has_index=True) if has_index and layout is not None else layout for layout in layouts]


def _common_layout(
    param: Param, source: QuantizedSource, names: Sequence[str], layouts: Sequence[Layout | None]
) -> Layout | None:
    """That of all sources, if they are quantised alike, so that one product serves all. Raises for experts that are
    not."""
    first = layouts[0]
    is_alike = all(layout == first for layout in layouts)
    if is_alike and first is not None and (first.has_index or first.has_input_scale):
        sides = [first.ordered(source.side(name)) for name in names]
        step = max(1, len(names) // param.num_matrices)
        is_alike = all(side.is_equal(sides[i - i % step]) for i, side in enumerate(sides))
    if is_alike and first is not None:
        return first
    if param.is_of_experts:
        raise UnsupportedModel(
            f"{names[0]} and others of its layer: experts that are quantised differently, or whose gates and ups have "
            "different input scales or orders of inputs, are not supported"
        )
    return None


def _alone(param: Param, index: int) -> Param:
    """One source of a param as a matrix of its own."""
    tensor = param.sources[index]
    return Param(tensor.shape, (param.axes[0], param.axes[-1]), (tensor,), num_contracted=1)


def _order(param: Param) -> Array:
    """int32 [outputs]: for each output its row, counted through all sources."""
    sizes = [tensor.shape[0] for tensor in param.sources]
    starts = np.cumsum([0, *sizes])
    rows = [np.arange(start, start + size, dtype=np.int32)[:, None] for start, size in zip(starts, sizes, strict=False)]
    assert param.join is not None, f"{param.sources} is one tensor"
    return param.join(rows).reshape(-1)
