"""Weights of a model from the matrices of a quantised checkpoint, joined without widening them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.errors import UnsupportedModel
from quire.models.formats.format import Array, CodedTensor, InputSide, Layout
from quire.models.formats.quantized_source import QuantizedSource
from quire.models.params import Param
from quire.ops.weights.coded import Coded
from quire.ops.weights.floats import PlainWeight
from quire.ops.weights.parts import Parts

Like = jax.ShapeDtypeStruct


def coded_weight(param: Param, source: QuantizedSource, names: Sequence[str], dtype: str) -> Coded | Parts | None:
    """On the host; `names` are those of its sources in the checkpoint. None if none of them is quantised.

    What stays in float is of `dtype`.
    """
    layouts = _layouts(param, source, names)
    if layouts is None:
        return None
    tensors = {name: source.read_coded(name) for name, layout in zip(names, layouts, strict=True) if layout is not None}
    if _is_joined(param, source, names, layouts):
        return _joined(param, layouts[0], [tensors[name] for name in names])
    parts = [
        PlainWeight(np.asarray(source.read(name)).astype(jnp.dtype(dtype)))
        if layout is None
        else _joined(_alone(param, index), layout, [tensors[name]])
        for index, (name, layout) in enumerate(zip(names, layouts, strict=True))
    ]
    return Parts(tuple(parts), _order(param), param.shape, param.contracted)


def coded_like(param: Param, source: QuantizedSource, names: Sequence[str], dtype: str) -> Coded | Parts | None:
    """The shapes and dtypes of the weight that `coded_weight` makes."""
    layouts = _layouts(param, source, names)
    if layouts is None:
        return None
    if _is_joined(param, source, names, layouts):
        return _like(param, layouts[0])
    parts = [
        PlainWeight(_struct(tensor.shape, dtype)) if layout is None else _like(_alone(param, index), layout)
        for index, (tensor, layout) in enumerate(zip(param.sources, layouts, strict=True))
    ]
    return Parts(tuple(parts), _struct((len(_order(param)),), "int32"), param.shape, param.contracted)


def _layouts(param: Param, source: QuantizedSource, names: Sequence[str]) -> list[Any] | None:
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
    return [layout._replace(has_index=True) if has_index and layout is not None else layout for layout in layouts]


def _ordered(side: InputSide, layout: Layout) -> InputSide:
    """With the order of its inputs where its layout has one. An expert that calibration never reached has them in
    order, which formats leave out; those beside it have another."""
    if side.index is not None or not layout.has_index:
        return side
    return replace(side, index=(np.arange(layout.inputs) // layout.group).astype(np.int32))


def _is_joined(param: Param, source: QuantizedSource, names: Sequence[str], layouts: Sequence[Layout | None]) -> bool:
    """True if all sources are quantised alike, so that one product serves all. Raises for experts that are not."""
    first = layouts[0]
    is_alike = first is not None and all(layout == first for layout in layouts)
    if is_alike and first is not None and (first.has_index or first.has_input_scale):
        sides = [_ordered(source.side(name), first) for name in names]
        step = max(1, len(names) // _num_matrices(param))
        is_alike = all(side.is_equal(sides[i - i % step]) for i, side in enumerate(sides))
    if not is_alike and param.is_of_experts:
        raise UnsupportedModel(
            f"{names[0]} and others of its layer: experts that are quantised differently, or whose gates and ups have "
            "different input scales or orders of inputs, are not supported"
        )
    return is_alike


def _joined(param: Param, layout: Layout, tensors: Sequence[CodedTensor]) -> Coded:
    def groups(arrays: Sequence[Array], number: int = layout.groups) -> Array:
        """Rows joined as those of the codes are, each with its groups."""
        joined = arrays[0] if param.join is None else param.join(arrays)
        return _own(joined.reshape(*_scales_shape(param, layout)[:-1], number))

    firsts = tensors[:: max(1, len(tensors) // _num_matrices(param))]
    sides = [_ordered(tensor.side, layout) for tensor in firsts]
    side = sides[0]
    if param.is_of_experts:
        side = InputSide(
            *(
                None if arrays[0] is None else np.stack(arrays)
                for arrays in zip(*(one.arrays for one in sides), strict=True)
            )
        )
    zeros = [tensor.zeros for tensor in tensors if tensor.zeros is not None]
    of_outputs = [tensor.output_scales for tensor in tensors if tensor.output_scales is not None]
    return Coded(
        codes=_own(param.assemble([tensor.codes for tensor in tensors])),
        scales=groups([tensor.scales for tensor in tensors]),
        zeros=groups(zeros) if zeros else None,
        index=side.index,
        input_scale=side.input_scale,
        input_zero=side.input_zero,
        output_scales=groups([one[:, None] for one in of_outputs], 1)[..., 0] if of_outputs else None,
        **_static(param, layout),
    )


def _like(param: Param, layout: Layout) -> Coded:
    lead = param.shape[:1] if param.is_of_experts else ()
    scales = _scales_shape(param, layout)
    has_input_zero = layout.has_input_scale and layout.rounding is not None and not layout.rounding.symmetric
    return Coded(
        codes=_struct((*param.shape[:-1], param.shape[-1] * layout.bits // 8), layout.code_dtype),
        scales=_struct(scales, layout.scale_dtype),
        zeros=_struct(scales, layout.zero_dtype) if layout.has_zeros else None,
        index=_struct((*lead, layout.inputs), "int32") if layout.has_index else None,
        input_scale=_struct(lead, "float32") if layout.has_input_scale else None,
        input_zero=_struct(lead, "float32") if has_input_zero else None,
        output_scales=_struct(scales[:-1], "float32") if layout.has_output_scales else None,
        **_static(param, layout),
    )


def _static(param: Param, layout: Layout) -> dict[str, Any]:
    return {
        "shape": param.shape,
        "num_contracted": param.contracted,
        "is_of_experts": param.is_of_experts,
        "bits": layout.bits,
        "group": layout.group,
        "rounding": layout.rounding,
    }


def _scales_shape(param: Param, layout: Layout) -> tuple[int, ...]:
    return (*param.shape[: len(param.shape) - param.contracted], layout.groups)


def _num_matrices(param: Param) -> int:
    return param.shape[0] if param.is_of_experts else 1


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


def _own(array: Array) -> Array:
    """The array in memory of its own, which a device may use: what is read only is a view of a file."""
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else array.copy()


def _struct(shape: tuple[int, ...], dtype: str) -> Like:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # type: ignore[no-untyped-call]
