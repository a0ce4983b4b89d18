"""Matrices of four-bit floats (e2m1) in groups: nvfp4 and mxfp4, as compressed-tensors and ModelOpt store them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.models.fields import Fields
from quire.models.formats.compressed_matrix import read_activations, refuse_arguments
from quire.models.formats.format import FLOAT8, FLOATS, Array, Module
from quire.models.formats.layout import CodedTensor, InputSide, Layout
from quire.ops.weights.activation_rounding import Rounding

LOCAL, POWERS = 16, 32  # inputs that share a scale: e4m3 over a scale of the matrix, or a power of two
_NAN = 255  # the power that is no number


@dataclass(frozen=True)
class TensorNames:
    """The tensors of a module, and whether the scales of whole matrices and of activations divide or multiply."""

    codes: str = "weight_packed"
    whole: str = "weight_global_scale"
    activations: str = "input_global_scale"
    are_divisors: bool = True


@dataclass(frozen=True)
class FourBitFloats:
    """The `Format` of a module.

    Codes are uint8 [outputs, inputs / 2], the lower half first. weight_scale is [outputs, inputs / group]: e4m3 in
    groups of 16, beside a float32 scale of the whole matrix, or a power of two plus 127 in groups of 32.
    """

    group: int
    rounding: Rounding | None
    names: TensorNames = TensorNames()

    @property
    def is_local(self) -> bool:
        return self.group == LOCAL

    @property
    def _rounds_locally(self) -> bool:
        """True where activations have scales over one that is stored."""
        return self.rounding is not None and self.rounding.bits == 4 and self.rounding.group == LOCAL

    @property
    def summary(self) -> str:
        kind = f"{'nvfp4' if self.is_local else 'mxfp4'} in groups of {self.group}"
        if self.rounding is None:
            return kind
        if self.rounding.bits == 4:
            return f"{kind}, {'nvfp4' if self._rounds_locally else 'mxfp4'} activations"
        return f"{kind}, dynamic {'fp8' if self.rounding.is_float else 'int8'} activations"

    def suffixes(self, module: Module) -> Sequence[str]:
        """Codes are quantised even where their scale is missing, which `layout` reports."""
        names = self.names
        others = [name for name in ("weight_scale", names.whole, names.activations) if module.has(name)]
        is_coded = module.has(names.codes) and module.info(names.codes).dtype not in FLOATS
        return [names.codes, *others] if is_coded or others else ()

    def layout(self, module: Module) -> tuple[int, Layout]:
        outputs, pairs = module.matrix(self.names.codes, ("uint8",)).shape
        inputs = 2 * pairs
        if inputs % self.group:
            raise module.error(self.names.codes, f"has {inputs} inputs, which groups of {self.group} do not divide")
        scale_dtype = FLOAT8 if self.is_local else "uint8"
        module.checked("weight_scale", ((outputs, inputs // self.group),), (scale_dtype,))
        for name, is_used in ((self.names.whole, self.is_local), (self.names.activations, self._rounds_locally)):
            if is_used:
                module.checked(name, ((), (1,)), FLOATS)
            elif module.has(name):
                raise module.error(name, "is not used: by its config there is nothing that it scales")
        return outputs, Layout(
            inputs=inputs,
            bits=4,
            code_dtype="uint8",
            scale_dtype=scale_dtype,
            group=self.group,
            has_zeros=False,
            has_index=False,
            rounding=self.rounding,
            has_input_scale=self._rounds_locally,
            has_output_scales=self.is_local,
        )

    def side(self, module: Module) -> InputSide:
        if not self._rounds_locally:
            return InputSide()
        scale = module.input_scale(self.names.activations)
        return InputSide(input_scale=scale if self.names.are_divisors else self._inverse(module, scale))

    def read(self, module: Module) -> CodedTensor:
        outputs, _ = self.layout(module)
        codes, side = module.read(self.names.codes), self.side(module)
        if not self.is_local:
            scales = module.read("weight_scale")
            if (scales == _NAN).any():
                raise module.error("weight_scale", f"has exponents of {_NAN}, which stand for no number")
            return CodedTensor(codes, scales, side=side)
        whole = module.input_scale(self.names.whole)
        factor = self._inverse(module, whole) if self.names.are_divisors else whole
        return CodedTensor(codes, module.scales("weight_scale"), side=side, output_scales=np.repeat(factor, outputs))

    def _inverse(self, module: Module, scale: Array) -> Array:
        with np.errstate(over="ignore"):
            found: Array = np.float32(1.0) / scale
        if not np.isfinite(found):
            raise module.error(self.names.codes, f"has a scale of {scale:g}, whose inverse is no number")
        return found


def read_four_bit_floats(group: Fields, is_local: bool) -> FourBitFloats:
    """That of a group of compressed-tensors' config."""
    fields = group.within("weights")
    refuse_arguments(fields)
    size, strategy = (LOCAL, "tensor_group") if is_local else (POWERS, "group")
    scales = "torch.float8_e4m3fn" if is_local else "torch.uint8"
    for name, value in (("num_bits", 4), ("type", "float"), ("group_size", size), ("strategy", strategy)):
        if fields.get(name) != value:
            raise fields.unsupported(name, f"with this format it is {value!r}")
    for name, known in (("symmetric", (True,)), ("dynamic", (False,)), ("scale_dtype", (scales, scales[6:]))):
        fields.only(name, *known)
    if fields.get("actorder") not in (None, False, "weight", "static"):
        raise fields.unsupported("actorder", "groups are of inputs that follow each other")
    return FourBitFloats(size, _activations(group))


def _activations(group: Fields) -> Rounding | None:
    fields = group.within("input_activations")
    if fields.get("num_bits") != 4:
        rounding, is_static = read_activations(group)
        if is_static:
            raise fields.unsupported("dynamic", "beside weights of four-bit floats it is true")
        return rounding
    refuse_arguments(fields)
    is_local = fields.get("strategy") == "tensor_group"
    size, strategy, dynamic = (LOCAL, "tensor_group", "local") if is_local else (POWERS, "group", True)
    for name, value in (("type", "float"), ("strategy", strategy), ("group_size", size), ("dynamic", dynamic)):
        if fields.get(name) != value:
            raise fields.unsupported(name, f"with four bits and strategy = {strategy} it is {value!r}")
    fields.only("symmetric", True)
    return Rounding(is_float=True, group=size, bits=4)
