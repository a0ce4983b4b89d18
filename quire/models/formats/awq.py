"""AWQ, in the layout that its files call gemm: codes of four bits in groups of inputs, with zero points."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.models.fields import Fields
from quire.models.formats.format import FLOATS, Format, Module
from quire.models.formats.layout import CodedTensor, InputSide, Layout
from quire.models.formats.packing import codes_of_awq, unpacked_awq, zeros_in_memory

SUFFIXES = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class AWQ:
    """Both the `Quantization` of a config and the `Format` of every quantised module.

    qweight int32 [inputs, outputs / 8] and qzeros int32 [groups, outputs / 8] have eight outputs in a word, in an order
    of their own; scales are [groups, outputs].
    """

    group_size: int | None  # None: one group
    cache_dtype: None = None

    @property
    def summary(self) -> str:
        return f"awq, 4 bits in {'one group' if self.group_size is None else f'groups of {self.group_size}'}"

    def format_of(self, name: str) -> Format:
        return self

    def suffixes(self, module: Module) -> Sequence[str]:
        return [suffix for suffix in SUFFIXES if module.has(suffix)] if module.has("qweight") else ()

    def layout(self, module: Module) -> tuple[int, Layout]:
        inputs, words = module.matrix("qweight", ("int32",)).shape
        group = inputs if self.group_size is None else self.group_size
        if inputs % 2 or inputs % group:
            raise module.error("qweight", f"has {inputs} inputs, which groups of {group} codes in pairs do not divide")
        scales = module.checked("scales", ((inputs // group, 8 * words),), FLOATS)
        module.checked("qzeros", ((inputs // group, words),), ("int32",))
        return 8 * words, Layout(inputs, 4, "uint8", scales.dtype, group, True, False, None, False)

    def side(self, module: Module) -> InputSide:
        return InputSide()

    def read(self, module: Module) -> CodedTensor:
        self.layout(module)
        zeros = zeros_in_memory(unpacked_awq(module.read("qzeros")), 4)
        scales = np.ascontiguousarray(module.scales("scales").T)
        return CodedTensor(codes_of_awq(module.read("qweight")), scales, np.ascontiguousarray(zeros.T))


def read_awq(fields: Fields) -> AWQ:
    if fields.get("bits") != 4:
        raise fields.unsupported("bits", "known is 4")
    for name in ("version", "format"):
        if name in fields and str(fields.get(name)).lower() != "gemm":
            raise fields.unsupported(name, "known is gemm")
    fields.only("zero_point", True)
    return AWQ(None if fields.get("group_size") in (-1, None) else fields.integer("group_size"))
