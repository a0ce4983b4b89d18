"""compressed-tensors: groups of modules, each with its own scheme for weights and activations."""

import re
from dataclasses import dataclass

from quire.models.fields import Fields
from quire.models.formats.cache_scheme import read_cache_scheme
from quire.models.formats.compressed_matrix import CompressedMatrix, read_activations, read_weights
from quire.models.formats.format import Format
from quire.models.formats.four_bit_floats import FourBitFloats, read_four_bit_floats
from quire.models.formats.patterns import checked_pattern

NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
STORED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", NVFP4, MXFP4)
Matrix = CompressedMatrix | FourBitFloats
# Those that say nothing about how a checkpoint is read.
_REMARKS = {"quant_method", "quantization_status", "global_compression_ratio", "version", "run_compressed"}
_KNOWN = _REMARKS | {
    "config_groups", "format", "ignore", "kv_cache_scheme", "sparsity_config", "transform_config",
    "moe_sparsity_config",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A class of modules, the name of one, or after `re:` a pattern that matches names from their beginning."""

    text: str

    def matches(self, name: str) -> bool:
        pattern = self.text.removeprefix("re:")
        return re.match(pattern, name) is not None if pattern != self.text else self.text in ("Linear", name)

    @property
    def rank(self) -> tuple[bool, bool, str]:
        """The order in which targets of a module are followed: its name, patterns by their text, its class."""
        return self.text == "Linear", self.text.startswith("re:"), self.text


@dataclass(frozen=True)
class CompressedTensors:
    """The `Quantization` of a config."""

    groups: tuple[tuple[tuple[Target, ...], Matrix], ...]
    ignored: tuple[Target, ...]
    cache_dtype: str | None = None

    @property
    def summary(self) -> str:
        matrices = " and ".join(dict.fromkeys(matrix.summary for _, matrix in self.groups))
        return f"compressed-tensors, {matrices or 'the cache alone'}"

    def format_of(self, name: str) -> Format | None:
        if any(target.matches(name) for target in self.ignored):
            return None
        found = [(target.rank, matrix) for targets, matrix in self.groups for target in targets if target.matches(name)]
        return min(found, key=lambda one: one[0])[1] if found else None


def read_compressed_tensors(fields: Fields) -> CompressedTensors:
    for name in fields:
        if name in fields and name not in _KNOWN:
            raise fields.unsupported(name, "it is unknown here, and may change what the weights are")
    _refuse_other_parts(fields)
    groups, cache_dtype = fields.within("config_groups"), read_cache_scheme(fields)
    if not list(groups) and cache_dtype is None:
        raise fields.invalid("config_groups", "there are none")
    default = fields.text("format", "naive-quantized")
    return CompressedTensors(
        tuple(_group(groups.within(name), default, fields) for name in groups),
        _targets(fields, "ignore") if "ignore" in fields else (),
        cache_dtype,
    )


def _refuse_other_parts(fields: Fields) -> None:
    sparsity = fields.within("sparsity_config")
    sparsity.only("format", "dense")
    for name in ("transform_config", "moe_sparsity_config"):
        if fields.get(name):
            raise fields.unsupported(name, "only weights and the inputs of linear layers are quantised")
    fields.only("quantization_status", "compressed", "frozen")


def _group(group: Fields, default_format: str, fields: Fields) -> tuple[tuple[Target, ...], Matrix]:
    for name in group:
        if name in group and name not in ("targets", "weights", "input_activations", "output_activations", "format"):
            raise group.unsupported(name, "it is unknown here")
    if group.get("output_activations"):
        raise group.unsupported("output_activations", "only the inputs of linear layers are quantised")
    stored = group.text("format", default_format)
    if stored not in STORED:
        where = group if "format" in group else fields
        raise where.unsupported("format", f"known are {', '.join(STORED)}")
    if "weights" not in group:
        raise group.unsupported("weights", "matrices are quantised, with or without their inputs")
    if stored in (NVFP4, MXFP4):
        return _targets(group, "targets"), read_four_bit_floats(group, stored == NVFP4)
    rounding, is_static = read_activations(group)
    matrix = read_weights(group.within("weights"), stored == "pack-quantized", rounding, is_static)
    return _targets(group, "targets"), matrix


def _targets(fields: Fields, name: str) -> tuple[Target, ...]:
    texts = fields.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise fields.invalid(name, "a list of strings is needed")
    for text in texts:
        if text.startswith("re:"):
            checked_pattern(fields, name, text.removeprefix("re:"))
    return tuple(map(Target, texts))
