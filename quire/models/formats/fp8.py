"""Checkpoints of `quant_method: fp8`: e4m3 in blocks, or with one scale for a matrix."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.models.fields import Fields
from quire.models.formats.cache_scheme import read_static_cache
from quire.models.formats.format import FLOAT8, FLOATS, Format, Module
from quire.models.formats.layout import CodedTensor, InputSide, Layout
from quire.ops.weights.activation_rounding import Rounding

# Tools name the same thing differently.
SCALES, INPUT_SCALES = ("weight_scale_inv", "weight_scale"), ("input_scale", "activation_scale")


@dataclass(frozen=True)
class FP8:
    """Both the `Quantization` of a config and the `Format` of every quantised module.

    weight e4m3 [outputs, inputs] is multiplied by weight_scale_inv [outputs / block, inputs / block], or by a single
    scale. Activations are e4m3: each run of a block's inputs with a scale of its own, or all with `input_scale`.
    """

    block: tuple[int, int] | None  # outputs and inputs; None: one scale
    is_static: bool
    cache_dtype: str | None = None

    @property
    def summary(self) -> str:
        scales = "one scale for a matrix" if self.block is None else f"blocks of {self.block[0]} x {self.block[1]}"
        return f"fp8, {scales}, {'static' if self.is_static else 'dynamic'} activations"

    def format_of(self, name: str) -> Format:
        return self

    def suffixes(self, module: Module) -> Sequence[str]:
        """A matrix of e4m3 is quantised even where its scale is missing, which `layout` reports."""
        if not module.has("weight"):
            return ()
        scales = [suffix for suffix in (*SCALES, *INPUT_SCALES) if module.has(suffix)]
        return ["weight", *scales] if scales or module.info("weight").dtype == FLOAT8 else ()

    def layout(self, module: Module) -> tuple[int, Layout]:
        outputs, inputs = module.matrix("weight", (FLOAT8,)).shape
        high, wide = self.block or (outputs, inputs)
        blocks = (-(-outputs // high), -(-inputs // wide))
        shapes = (blocks,) if self.block else ((), (1,))
        scales = module.checked(_present(module, SCALES), shapes, FLOATS)
        if self.is_static:
            module.checked(_present(module, INPUT_SCALES), ((), (1,)), FLOATS)
        elif found := [suffix for suffix in INPUT_SCALES if module.has(suffix)]:
            raise module.error(found[0], "is not used by activation_scheme = dynamic")
        rounding = Rounding(is_float=True, group=wide if self.block else None)
        return outputs, Layout(inputs, 8, FLOAT8, scales.dtype, wide, False, False, rounding, self.is_static)

    def side(self, module: Module) -> InputSide:
        return InputSide(input_scale=module.input_scale(_present(module, INPUT_SCALES)) if self.is_static else None)

    def read(self, module: Module) -> CodedTensor:
        outputs, _ = self.layout(module)
        scales = module.scales(_present(module, SCALES))
        high = self.block[0] if self.block else outputs
        scales = np.repeat(scales.reshape(-1, scales.shape[-1] if self.block else 1), high, axis=0)[:outputs]
        return CodedTensor(module.read("weight"), scales, side=self.side(module))


def read_fp8(fields: Fields) -> FP8:
    for name, supported in (("fmt", "e4m3"), ("scale_fmt", "float"), ("expert_dtype", "fp8"), ("dequantize", False)):
        fields.only(name, supported)
    for name in ("kv_cache_quant_method", "modules_to_convert"):
        if fields.get(name):
            raise fields.unsupported(name, "weights and activations of linear layers are quantised, nothing else")
    scheme = fields.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise fields.unsupported("activation_scheme", "known are dynamic and static")
    cache_dtype = read_static_cache(fields)
    if "weight_block_size" not in fields:
        return FP8(None, scheme == "static", cache_dtype)
    high, wide = fields.integers("weight_block_size", 2)
    if min(high, wide) < 1:
        raise fields.invalid("weight_block_size", "two numbers above zero are needed")
    if scheme == "static":
        raise fields.unsupported("activation_scheme", "with weight_block_size it is dynamic")
    return FP8((high, wide), False, cache_dtype)


def _present(module: Module, suffixes: Sequence[str]) -> str:
    """The first of these that there is; the first of all where there is none, which is reported as missing."""
    return next((suffix for suffix in suffixes if module.has(suffix)), suffixes[0])
