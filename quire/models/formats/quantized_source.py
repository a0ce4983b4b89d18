"""A quantised checkpoint as a source of tensors: each quantised matrix is one, under the name of its weight."""

from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from quire.errors import InvalidCheckpoint, UnsupportedModel, listed, shown
from quire.files.gguf_source import GGUFSource
from quire.files.model_files import ModelFiles
from quire.files.safetensors_source import SafetensorsSource
from quire.files.tensor_source import Array, TensorInfo
from quire.models.fields import Fields
from quire.models.formats.auto_round import read_auto_round
from quire.models.formats.awq import read_awq
from quire.models.formats.cache_scheme import CACHE_SCALES, CACHE_ZEROS
from quire.models.formats.compressed_tensors import read_compressed_tensors
from quire.models.formats.fbgemm_fp8 import read_fbgemm_fp8
from quire.models.formats.format import Format, Module, Quantization
from quire.models.formats.fp8 import read_fp8
from quire.models.formats.gptq import read_gptq
from quire.models.formats.layout import CodedTensor, InputSide, Layout
from quire.models.formats.modelopt import read_modelopt
from quire.models.formats.mxfp4 import read_mxfp4
from quire.models.formats.refused_methods import REASONS

READERS: dict[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "awq": read_awq,
    "mxfp4": read_mxfp4,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "fbgemm_fp8": read_fbgemm_fp8,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
}


class QuantizedSource:
    """The tensors of a folder, of which some stand for matrices together.

    `tensors` has a matrix as float32, which is what `read` gives; `read_coded` gives its codes. All names, shapes and
    dtypes are compared when the source is made.
    """

    def __init__(self, source: SafetensorsSource, quantization: Quantization) -> None:
        self.quantization = quantization
        self._source = source
        self._coded: dict[str, tuple[Module, Format, tuple[int, Layout]]] = {}
        self._bytes: dict[str, int] = {}
        used: set[str] = set()
        problems = []
        for module in _modules(source):
            try:
                format_ = quantization.format_of(module.name)
                suffixes = () if format_ is None else format_.suffixes(module)
                if format_ is not None and suffixes:
                    self._coded[module.weight] = module, format_, format_.layout(module)
                    self._bytes[module.weight] = sum(_num_bytes(module.info(suffix)) for suffix in suffixes)
                    used.update(map(module.tensor, suffixes))
            except InvalidCheckpoint as error:
                problems.append(str(error))
        if problems:
            raise InvalidCheckpoint(f"the checkpoint does not fit its quantization_config: {listed(problems, '; ')}")
        used |= _cache_scales(source) if quantization.cache_dtype is not None else set()
        plain = {name: info for name, info in source.tensors().items() if name not in used}
        if both := sorted(plain.keys() & self._coded.keys()):
            raise InvalidCheckpoint(f"stored both quantised and not: {listed(both)}")
        matrices = {
            name: TensorInfo((outputs, layout.inputs), "float32")
            for name, (_, _, (outputs, layout)) in self._coded.items()
        }
        self._infos = plain | matrices

    @property
    def files(self) -> list[Path]:
        return self._source.files

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def layout(self, name: str) -> tuple[int, Layout] | None:
        """Outputs and layout of a quantised matrix; None of another tensor."""
        found = self._coded.get(name)
        return None if found is None else found[2]

    def num_bytes(self, name: str) -> int:
        """Bytes in the file."""
        return self._bytes[name] if name in self._bytes else _num_bytes(self._infos[name])

    def read_coded(self, name: str) -> CodedTensor:
        module, format_, _ = self._coded[name]
        return format_.read(module)

    def side(self, name: str) -> InputSide:
        module, format_, _ = self._coded[name]
        return format_.side(module)

    def read(self, name: str) -> Array:
        found = self.layout(name)
        return self._source.read(name) if found is None else found[1].widened(self.read_coded(name))

    def is_zero_bias(self, name: str) -> bool:
        """True for a bias of zeros that a tool added to a quantised matrix without one."""
        module, _, suffix = name.rpartition(".")
        return suffix == "bias" and f"{module}.weight" in self._coded and not self._source.read(name).any()


def _modules(source: SafetensorsSource) -> list[Module]:
    found: dict[str, Module] = {}
    for name in source.tensors():
        stem, _, suffix = name.rpartition("_")
        is_stacked = suffix in ("blocks", "scales")
        module = stem if is_stacked else name.rpartition(".")[0]
        found.setdefault(module, Module(module, source, is_stacked))
    return list(found.values())


def _cache_scales(source: SafetensorsSource) -> set[str]:
    """Names of the scales of keys and values, which a cache with finer ones of its own does not need."""
    scales = {name for name in source.tensors() if name.rpartition(".")[2] in CACHE_SCALES}
    zeros = {name for name in source.tensors() if name.rpartition(".")[2] in CACHE_ZEROS}
    for name in sorted(zeros):
        if source.read(name).astype(np.float32).any():
            raise InvalidCheckpoint(f"{name} is not 0, which kv_cache_scheme.symmetric = true promises")
    return scales | zeros


def open_checkpoint(files: ModelFiles) -> "GGUFSource | SafetensorsSource | QuantizedSource | None":
    """The checkpoint of a model; None for random weights. Raises for quantisation that is not supported."""
    quantization = read_quantization(files.config)
    source = files.open_weights()
    if quantization is None:
        return source
    if not isinstance(source, SafetensorsSource):
        raise UnsupportedModel(
            f"{files.name}: quantization_config is for safetensors files; these weights are not in any"
        )
    return QuantizedSource(source, quantization)


def read_quantization(config: Mapping[str, object]) -> Quantization | None:
    """The quantisation of a config; None if it has none."""
    fields = Fields(config, str(config.get("model_type")))
    if not fields.get("quantization_config") and fields.get("text_config"):
        fields = fields.within("text_config")
    if not fields.get("quantization_config"):
        return None
    inner = fields.within("quantization_config")
    method = inner.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        reason = (
            REASONS.get(method, f"known are {', '.join(READERS)}") if isinstance(method, str) else "a name is needed"
        )
        raise UnsupportedModel(
            f"{fields.family}: quantization_config.quant_method = {shown(method)} is not supported: {reason}"
        )
    return READERS[method](inner)


def _num_bytes(info: TensorInfo) -> int:
    return int(np.prod(info.shape, dtype=np.int64)) * np.dtype(jnp.dtype(info.dtype)).itemsize
