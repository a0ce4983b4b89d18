"""NVIDIA ModelOpt: e4m3 with one scale, a scale for each output, or blocks, and nvfp4, by the name of an algorithm."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import translate

from quire.models.fields import Fields
from quire.models.formats.cache_scheme import read_cache_scheme
from quire.models.formats.compressed_matrix import CompressedMatrix
from quire.models.formats.format import Format
from quire.models.formats.four_bit_floats import LOCAL, FourBitFloats, TensorNames
from quire.ops.weights.activation_rounding import Rounding

_KNOWN = {
    "quant_method", "producer", "quantization", "quant_algo", "kv_cache_quant_algo", "kv_cache_scheme",
    "exclude_modules", "ignore", "config_groups", "group_size", "quantized_layers",
}  # fmt: skip
_GROUP = {"targets", "weights", "input_activations"}
_BLOCK = 128  # outputs and inputs of a block, which files of FP8_PB_WO do not say
_CACHES = {"FP8": "fp8_e4m3", "INT8": "int8"}
_MAX_WILDCARD = 500


_NVFP4 = TensorNames("weight", "weight_scale_2", "input_scale", are_divisors=False)

Matrix = CompressedMatrix | FourBitFloats


@dataclass(frozen=True)
class Algorithm:
    matrix: Callable[[Fields], Matrix]
    bits: int  # of a weight


def _float8(
    strategy: str, rounding: Rounding | None, *, is_static: bool = False
) -> Callable[[Fields], CompressedMatrix]:
    def matrix(fields: Fields) -> CompressedMatrix:
        side = fields.integer("group_size", _BLOCK) if strategy == "block" else None
        return CompressedMatrix(
            bits=8,
            is_float=True,
            strategy=strategy,
            size=None if side is None else (side, side),
            symmetric=True,
            is_packed=False,
            needs_index=False,
            rounding=rounding,
            is_static=is_static,
        )

    return matrix


def _four_bits(rounding: Rounding | None) -> Callable[[Fields], Matrix]:
    def matrix(fields: Fields) -> FourBitFloats:
        fields.only("group_size", LOCAL)
        return FourBitFloats(LOCAL, rounding, _NVFP4)

    return matrix


ALGORITHMS = {
    "FP8": Algorithm(_float8("tensor", Rounding(is_float=True), is_static=True), 8),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm(_float8("channel", Rounding(is_float=True)), 8),
    "FP8_PB_WO": Algorithm(_float8("block", None), 8),
    "NVFP4": Algorithm(_four_bits(Rounding(is_float=True, group=LOCAL, bits=4)), 4),
    "W4A16_NVFP4": Algorithm(_four_bits(None), 4),
}


@dataclass(frozen=True)
class ModelOpt:
    """The `Quantization` of a config. `layers` are the modules of MIXED_PRECISION; else all have the `default`."""

    default: Matrix | None
    layers: Mapping[str, Matrix]
    excluded: tuple[re.Pattern[str], ...]
    cache_dtype: str | None = None

    @property
    def summary(self) -> str:
        matrices = (*self.layers.values(), *(() if self.default is None else (self.default,)))
        words = " and ".join(dict.fromkeys(matrix.summary for matrix in matrices))
        return f"modelopt, {words or 'the cache alone'}"

    def format_of(self, name: str) -> Format | None:
        if any(pattern.match(name) for pattern in self.excluded):
            return None
        while name and name not in self.layers:  # all experts of a layer may have one entry
            name = name.rpartition(".")[0]
        return self.layers.get(name, self.default)


def read_modelopt(fields: Fields) -> ModelOpt:
    """The fields of ModelOpt's own file, within `quantization`, or those that it writes into config.json."""
    inner = fields.within("quantization") if "quantization" in fields else fields
    for where in (fields, inner):
        for name in where:
            if where.get(name) and name not in _KNOWN:
                raise where.unsupported(name, "it is unknown here, and may change what the weights are")
    cache_dtype = _cache_dtype(inner)
    excluded = (*_wildcards(inner, "exclude_modules"), *_wildcards(inner, "ignore"))
    layers: dict[str, Matrix] = {}
    default = None
    if str(inner.get("quant_algo")).upper() == "MIXED_PRECISION":
        each = inner.within("quantized_layers")
        layers = {name: _layer(each.within(name)) for name in each}
        if not layers:
            raise inner.invalid("quantized_layers", "MIXED_PRECISION needs the algorithm of each layer")
    elif "quant_algo" in inner or cache_dtype is None:
        default = _matrix(inner)
        _compare_groups(inner, default)
    return ModelOpt(default, layers, excluded, cache_dtype)


def _matrix(fields: Fields) -> Matrix:
    return _algorithm(fields).matrix(fields)


def _layer(fields: Fields) -> Matrix:
    for name in fields:
        if fields.get(name) and name not in ("quant_algo", "group_size"):
            raise fields.unsupported(name, "it is unknown here, and may change what the weights are")
    return _matrix(fields)


def _algorithm(fields: Fields) -> Algorithm:
    name = fields.text("quant_algo").upper()
    if name not in ALGORITHMS:
        raise fields.unsupported("quant_algo", f"known are {', '.join(ALGORITHMS)} and MIXED_PRECISION")
    return ALGORITHMS[name]


def _compare_groups(fields: Fields, matrix: Matrix) -> None:
    """`config_groups` repeats what the algorithm says, less exactly."""
    bits = _algorithm(fields).bits
    groups = fields.within("config_groups")
    for group in map(groups.within, groups):
        for name in group:
            if group.get(name) and name not in _GROUP:
                raise group.unsupported(name, "it is unknown here, and may change what the weights are")
        weights = group.within("weights")
        weights.only("num_bits", bits)
        weights.only("type", "float")
        if isinstance(matrix, FourBitFloats):
            weights.only("group_size", matrix.group)
        else:
            weights.only("strategy", matrix.strategy)


def _cache_dtype(fields: Fields) -> str | None:
    if isinstance(fields.get("kv_cache_scheme"), Mapping):
        return read_cache_scheme(fields)
    name = next((name for name in ("kv_cache_quant_algo", "kv_cache_scheme") if fields.get(name)), None)
    if name is None:
        return None
    algorithm = fields.text(name).upper()
    if algorithm not in _CACHES:
        raise fields.unsupported(name, f"known are {' and '.join(_CACHES)}")
    return _CACHES[algorithm]


def _wildcards(fields: Fields, name: str) -> tuple[re.Pattern[str], ...]:
    """Names of modules, with the wildcards of file names."""
    texts = fields.get(name)
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) and len(text) <= _MAX_WILDCARD for text in texts):
        raise fields.invalid(name, f"a list of strings of up to {_MAX_WILDCARD} characters is needed")
    return tuple(re.compile(translate(text)) for text in texts)
