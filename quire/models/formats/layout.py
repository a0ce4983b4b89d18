"""The layout of a quantised matrix in memory, and the weight that matrices of the same layout become."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quire.models.params import Param
from quire.ops.weights.activation_rounding import Rounding
from quire.ops.weights.coded import MIDDLE, Coded
from quire.ops.weights.weight import Weight

Array = np.ndarray[Any, Any]

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOATS_OF_FOUR_BITS = np.array([*_SIZES, *(-size for size in _SIZES)], np.float32)  # e2m1, by code


@dataclass(frozen=True)
class InputSide:
    """The part of a matrix that is the same for all outputs."""

    index: Array | None = None  # int32 [inputs]
    input_scale: Array | None = None  # float32 []
    input_zero: Array | None = None  # float32 []

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        return self.index, self.input_scale, self.input_zero

    def is_equal(self, other: "InputSide") -> bool:
        return all(
            one is another or (one is not None and another is not None and np.array_equal(one, another))
            for one, another in zip(self.arrays, other.arrays, strict=True)
        )


class CodedTensor(NamedTuple):
    """A matrix [outputs, inputs]; the arrays are those of `quire.ops.weights.coded.Coded`."""

    codes: Array  # [outputs, inputs], or [outputs, inputs / 2] of four bits
    scales: Array  # [outputs, groups]
    zeros: Array | None = None  # [outputs, groups]
    side: InputSide = InputSide()
    output_scales: Array | None = None  # float32 [outputs]


@dataclass(frozen=True)
class Layout:
    """All that is known of a matrix [outputs, inputs] from its tensors' shapes. Matrices with the same can be joined,
    whatever numbers of outputs they have."""

    inputs: int
    bits: int  # of a code in memory: 8, or 4 in pairs
    code_dtype: str
    scale_dtype: str
    group: int  # inputs with the same scale
    has_zeros: bool
    has_index: bool
    rounding: Rounding | None
    has_input_scale: bool
    has_output_scales: bool = False

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)

    @property
    def zero_dtype(self) -> str:
        return "int8" if self.bits == 4 else "int16"

    def ordered(self, side: InputSide) -> InputSide:
        """With the order of its inputs where this layout has one. An expert that calibration never reached has them in
        order, which formats leave out; those beside it have another."""
        if side.index is not None or not self.has_index:
            return side
        return replace(side, index=(np.arange(self.inputs) // self.group).astype(np.int32))

    def joined(self, param: Param, tensors: Sequence[CodedTensor]) -> Weight:
        """The weight of matrices with this layout, on the host."""

        def groups(arrays: Sequence[Array], number: int = self.groups) -> Array:
            """Rows joined as those of the codes are, each with its groups."""
            joined = arrays[0] if param.join is None else param.join(arrays)
            return _own(joined.reshape(*self._scales_shape(param)[:-1], number))

        sides = [self.ordered(tensor.side) for tensor in tensors[:: max(1, len(tensors) // param.num_matrices)]]
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
            **self._static(param),
        )

    def like(self, param: Param) -> Weight:
        """The shapes and dtypes of what `joined` gives."""
        lead = param.shape[:1] if param.is_of_experts else ()
        scales = self._scales_shape(param)
        has_input_zero = self.has_input_scale and self.rounding is not None and not self.rounding.symmetric
        return Coded(
            codes=struct((*param.shape[:-1], param.shape[-1] * self.bits // 8), self.code_dtype),
            scales=struct(scales, self.scale_dtype),
            zeros=struct(scales, self.zero_dtype) if self.has_zeros else None,
            index=struct((*lead, self.inputs), "int32") if self.has_index else None,
            input_scale=struct(lead, "float32") if self.has_input_scale else None,
            input_zero=struct(lead, "float32") if has_input_zero else None,
            output_scales=struct(scales[:-1], "float32") if self.has_output_scales else None,
            **self._static(param),
        )

    def widened(self, tensor: CodedTensor) -> Array:
        """float32 [outputs, inputs] of one matrix."""
        codes = tensor.codes
        if self.bits == 4:
            codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(codes), -1)
        index = np.arange(self.inputs) // self.group if tensor.side.index is None else tensor.side.index
        if self.bits == 4 and tensor.scales.dtype.itemsize == 1:
            floats = _FLOATS_OF_FOUR_BITS[codes]
            if tensor.scales.dtype == np.uint8:
                return np.ldexp(floats, tensor.scales[:, index].astype(np.int32) - 127).astype(np.float32)
            floats *= tensor.scales[:, index].astype(np.float32)
            return floats if tensor.output_scales is None else floats * tensor.output_scales[:, None]
        numbers = codes.astype(np.float32)
        if tensor.zeros is not None:
            numbers -= tensor.zeros[:, index]
        elif self.bits == 4:
            numbers -= MIDDLE
        numbers *= tensor.scales[:, index].astype(np.float32)
        return numbers

    def _static(self, param: Param) -> dict[str, Any]:
        return {
            "shape": param.shape,
            "num_contracted": param.contracted,
            "is_of_experts": param.is_of_experts,
            "bits": self.bits,
            "group": self.group,
            "rounding": self.rounding,
        }

    def _scales_shape(self, param: Param) -> tuple[int, ...]:
        return (*param.shape[: len(param.shape) - param.contracted], self.groups)


def _own(array: Array) -> Array:
    """The array in memory of its own, which a device may use: what is read only is a view of a file."""
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else array.copy()


def struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # type: ignore[no-untyped-call]
