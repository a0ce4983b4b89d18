"""AutoRound: matrices in the words of gptq or awq, and numbers of bits that may differ from layer to layer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.models.fields import Fields
from quire.models.formats.awq import AWQ
from quire.models.formats.format import Format
from quire.models.formats.gptq import GPTQ
from quire.models.formats.patterns import checked_pattern

_GPTQ, _GPTQ_V2, _AWQ = "auto_gptq", "gptqmodel", "auto_awq"
# By the packing without `auto_round:`. The first is that of files which do not say.
PACKINGS = {
    _GPTQ: _GPTQ, "gptq": _GPTQ, "auto": _GPTQ, "auto_round": _GPTQ_V2, _GPTQ_V2: _GPTQ_V2, _AWQ: _AWQ, "awq": _AWQ,
}  # fmt: skip
_FLOAT_BITS = 16
_SCHEME = ("bits", "group_size", "sym")
_BLOCKS = ("quant_block_list", "block_name_to_quantize", "to_quant_block_names")  # the first that there is
_OTHERS = (
    "super_bits", "rotation_config", "spinquant_config", "transform_config", "static_kv_dtype",
    "static_attention_dtype", "dynamic",
)  # fmt: skip
_NAME = re.compile(r"[\w.-]+")  # other keys are patterns


@dataclass(frozen=True)
class AutoRound:
    """The `Quantization` of a config. Formats that are None are of modules that stay in float."""

    default: GPTQ | AWQ | None
    layers: Mapping[str, GPTQ | AWQ | None]  # by name
    patterns: tuple[tuple[re.Pattern[str], GPTQ | AWQ | None], ...]  # found in a name
    blocks: tuple[str, ...]  # beginnings of the names of all others that are quantised
    cache_dtype: None = None

    @property
    def summary(self) -> str:
        formats = (self.default, *self.layers.values(), *(format_ for _, format_ in self.patterns))
        return f"auto-round, {'; '.join(dict.fromkeys(one.summary for one in formats if one is not None))}"

    def format_of(self, name: str) -> Format | None:
        if name in self.layers:
            return self.layers[name]
        for pattern, format_ in self.patterns:
            if pattern.search(name):
                return format_
        return self.default if name.startswith(self.blocks) else None


def read_auto_round(fields: Fields) -> AutoRound:
    packing = _packing(fields)
    _refuse_other_parts(fields)
    default = _format(fields, packing)
    overrides = fields.within("extra_config")
    layers: dict[str, GPTQ | AWQ | None] = {}
    patterns = []
    for name in overrides:
        scheme = overrides.within(name)
        _refuse_other_parts(scheme)
        usual = {key: fields.get(key) for key in _SCHEME}
        format_ = _format(overrides.within(name, defaults=usual), packing)
        if _NAME.fullmatch(name):
            layers[name] = format_
        else:
            patterns.append((checked_pattern(fields, "extra_config", name), format_))
    return AutoRound(default, layers, tuple(patterns), _blocks(fields))


def _packing(fields: Fields) -> str:
    text = fields.text("packing_format", f"auto_round:{_GPTQ}")
    packing = PACKINGS.get(text.removeprefix("auto_round:"))
    if packing is None:
        known = ", ".join(f"auto_round:{name}" for name in (_GPTQ, _GPTQ_V2, _AWQ))
        raise fields.unsupported("packing_format", f"known are {known} and auto_round")
    backend = str(fields.get("backend") or "auto")
    if "packing_format" not in fields and backend != "auto" and "gptq" not in backend:
        raise fields.unsupported("backend", "without packing_format it says how words are packed, in an older way")
    return packing


def _refuse_other_parts(fields: Fields) -> None:
    """Of the whole config, or of a layer."""
    if fields.get("bits") != _FLOAT_BITS:
        fields.only("data_type", "int")
    act_bits = fields.get("act_bits")
    if act_bits is not None and (type(act_bits) is not int or act_bits < _FLOAT_BITS):
        raise fields.unsupported("act_bits", "the weights alone are quantised")
    for name in _OTHERS:
        if fields.get(name):
            raise fields.unsupported(name, "only codes, scales and zero points of weights are read")


def _format(fields: Fields, packing: str) -> GPTQ | AWQ | None:
    bits = fields.integer("bits")
    if bits == _FLOAT_BITS:
        return None
    known = (4,) if packing == _AWQ else (4, 8)
    if bits not in known:
        raise fields.unsupported("bits", f"known are {', '.join(map(str, known))}, and {_FLOAT_BITS} for floats")
    group_size = None if fields.get("group_size") == -1 else fields.integer("group_size")
    symmetric = fields.flag("sym", True)
    return AWQ(group_size) if packing == _AWQ else GPTQ(bits, group_size, symmetric, packing == _GPTQ)


def _blocks(fields: Fields) -> tuple[str, ...]:
    """Beginnings of names: a text with commas, a list, or lists in a list. The empty text begins every name."""
    name = next((name for name in _BLOCKS if name in fields), None)
    if name is None:
        return ("",)
    found = fields.get(name)
    if isinstance(found, str):
        found = found.split(",")
    elif isinstance(found, list):
        found = [text for part in found for text in (part if isinstance(part, list) else [part])]
    if not isinstance(found, list) or not found or not all(isinstance(text, str) and text.strip() for text in found):
        raise fields.invalid(name, "names of blocks are needed")
    return tuple(text.strip() for text in found)
