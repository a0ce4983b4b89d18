"""Checkpoints of `quant_method: mxfp4`: experts of four bits, in blocks of 32 that share a power of two."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.models.fields import Fields
from quire.models.formats.format import Format, Module
from quire.models.formats.layout import CodedTensor, InputSide, Layout

BLOCK = 32  # inputs that share an exponent
_NAN = 255  # the exponent that is no number


@dataclass(frozen=True)
class MXFP4:
    """Both the `Quantization` of a config and the `Format` of the experts of a layer, which are one matrix.

    blocks uint8 [experts, outputs, inputs / 32, 16] have two codes in a byte, the lower first. scales uint8 [experts,
    outputs, inputs / 32] are exponents of two, plus 127.
    """

    cache_dtype: None = None

    @property
    def summary(self) -> str:
        return f"mxfp4, blocks of {BLOCK} (experts)"

    def format_of(self, name: str) -> Format:
        return self

    def suffixes(self, module: Module) -> Sequence[str]:
        """Half of the pair is quantised too, which `layout` reports."""
        return ("blocks", "scales") if module.is_stacked else ()

    def layout(self, module: Module) -> tuple[int, Layout]:
        shape = module.info("blocks").shape
        if len(shape) != 4 or 0 in shape or shape[-1] != BLOCK // 2:
            raise module.error("blocks", f"is {list(shape)}; [experts, outputs, blocks, {BLOCK // 2}] is needed")
        experts, outputs, blocks, _ = shape
        module.checked("blocks", (shape,), ("uint8",))
        module.checked("scales", (shape[:3],), ("uint8",))
        return experts * outputs, Layout(
            inputs=blocks * BLOCK,
            bits=4,
            code_dtype="uint8",
            scale_dtype="uint8",
            group=BLOCK,
            has_zeros=False,
            has_index=False,
            rounding=None,
            has_input_scale=False,
        )

    def side(self, module: Module) -> InputSide:
        return InputSide()

    def read(self, module: Module) -> CodedTensor:
        rows, layout = self.layout(module)
        scales = module.read("scales").reshape(rows, layout.groups)
        if (scales == _NAN).any():
            raise module.error("scales", f"has exponents of {_NAN}, which stand for no number")
        return CodedTensor(module.read("blocks").reshape(rows, -1), scales)


def read_mxfp4(fields: Fields) -> MXFP4:
    if fields.family != "gpt_oss":
        raise fields.unsupported("quant_method", "of the families here, gpt_oss alone has experts that are stored so")
    fields.only("dequantize", False)
    if "modules_to_not_convert" in fields and not isinstance(fields.get("modules_to_not_convert"), list):
        raise fields.invalid("modules_to_not_convert", "a list of names is needed")  # the file says the same by tensors
    return MXFP4()
