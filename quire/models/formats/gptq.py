"""GPTQ: codes of four or eight bits in groups of inputs, which may be in the order of their importance."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.models.fields import Fields
from quire.models.formats.format import FLOATS, Format, Module
from quire.models.formats.layout import CodedTensor, InputSide, Layout
from quire.models.formats.packing import codes_of_gptq, plus_one, unpacked, zeros_in_memory

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class GPTQ:
    """Both the `Quantization` of a config and the `Format` of every quantised module.

    qweight int32 [inputs * bits / 32, outputs] has the codes of consecutive inputs in a word, qzeros int32
    [groups, outputs * bits / 32] the zero points of consecutive outputs, scales [groups, outputs]; g_idx int32 [inputs]
    is the group of each input. The first version of the format stores zero points less one.
    """

    bits: int
    group_size: int | None  # None: one group
    symmetric: bool
    stores_less_one: bool
    needs_index: bool = False
    cache_dtype: None = None

    @property
    def summary(self) -> str:
        groups = "one group" if self.group_size is None else f"groups of {self.group_size}"
        return f"gptq, {self.bits} bits in {groups}"

    def format_of(self, name: str) -> Format:
        return self

    def suffixes(self, module: Module) -> Sequence[str]:
        return [suffix for suffix in SUFFIXES if module.has(suffix)] if module.has("qweight") else ()

    def layout(self, module: Module) -> tuple[int, Layout]:
        words, outputs = module.matrix("qweight", ("int32",)).shape
        inputs = words * 32 // self.bits
        group = inputs if self.group_size is None else self.group_size
        groups = -(-inputs // group)
        scales = module.checked("scales", ((groups, outputs),), FLOATS)
        if outputs * self.bits % 32:
            raise module.error("qweight", f"has {outputs} outputs; their zero points do not fill whole words")
        module.checked("qzeros", ((groups, outputs * self.bits // 32),), ("int32",))
        if self.needs_index or module.has("g_idx"):
            module.checked("g_idx", ((inputs,),), ("int32", "int64"))
        layout = Layout(
            inputs=inputs,
            bits=self.bits,
            code_dtype="uint8" if self.bits == 4 else "int8",
            scale_dtype=scales.dtype,
            group=group,
            has_zeros=not self.symmetric,
            has_index=self.side(module).index is not None,
            rounding=None,
            has_input_scale=False,
        )
        return outputs, layout

    def read(self, module: Module) -> CodedTensor:
        outputs, layout = self.layout(module)
        words = np.ascontiguousarray(module.read("qzeros"))
        zeros = unpacked(plus_one(words, self.bits) if self.stores_less_one else words, self.bits, outputs)
        if self.symmetric and (zeros != 2 ** (self.bits - 1)).any():
            middle = 2 ** (self.bits - 1)
            raise module.error("qzeros", f"has zero points other than {middle}, which sym = true promises")
        return CodedTensor(
            codes_of_gptq(module.read("qweight"), self.bits, layout.inputs),
            np.ascontiguousarray(module.scales("scales").T),
            None if self.symmetric else np.ascontiguousarray(zeros_in_memory(zeros, self.bits).T),
            self.side(module),
        )

    def side(self, module: Module) -> InputSide:
        if not module.has("g_idx"):
            return InputSide()
        inputs = module.info("g_idx").shape[0]
        return InputSide(module.index("g_idx", inputs if self.group_size is None else self.group_size))


def read_gptq(fields: Fields) -> GPTQ:
    if fields.get("bits") not in (4, 8):
        raise fields.unsupported("bits", "known are 4 and 8")
    for name in ("checkpoint_format", "format"):
        fields.only(name, "gptq", "gptq_v2")
    fields.only("is_marlin_format", False)
    fields.only("pack_dtype", "int32")
    overrides = fields.within("dynamic")
    if any(not name.startswith("-:") for name in overrides):
        raise fields.unsupported("dynamic", "all quantised modules have the same bits and groups")
    for name in ("rotation", "adapter"):
        if fields.get(name):
            raise fields.unsupported(name, "only the quantised weights themselves are read")
    name = "checkpoint_format" if "checkpoint_format" in fields else "format"
    group_size = None if fields.get("group_size") in (-1, None) else fields.integer("group_size")
    return GPTQ(
        bits=fields.integer("bits"),
        group_size=group_size,
        symmetric=fields.flag("sym", True),
        stores_less_one=fields.text(name, "gptq") == "gptq",
        needs_index=fields.flag("desc_act", False) and group_size is not None,
    )
