"""Weights in a GGUF file, under Hugging Face names, dequantised as they are read."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quire.errors import InvalidCheckpoint, UnsupportedModel
from quire.files.gguf import GGUFTensor, read_header
from quire.files.gguf_config import ROPE_FACTORS, architecture_of, config_from_gguf
from quire.files.gguf_experts import MAX_EXPERTS
from quire.files.regular_file import open_regular
from quire.files.tensor_source import BLOCK, BLOCK_SIZE, Array, TensorInfo
from quire.settings.machine import num_processors

_PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
_CHUNK_ELEMENTS = 1 << 18  # a thread's temporaries stay in its cache
_MAX_THREADS = 8
_MAX_TENSORS = 1 << 18  # those of each expert counted; the largest models have a third of it


class GGUFSource:
    """The tensors of a GGUF file, or of all its parts.

    Quantised ones read as float32, and some of them as blocks of eight bits; others read in their own dtype.
    """

    def __init__(self, path: str | Path) -> None:
        self._header = read_header(path)
        self._architecture = architecture_of(self._header)
        self._refuse_types()
        self._by_name: dict[str, GGUFTensor] = {}
        for tensor in self._header.tensors.values():
            if tensor.name == ROPE_FACTORS:
                continue
            for name, part in self._parts(tensor):
                if name in self._by_name:
                    raise InvalidCheckpoint(
                        f"{self._header.path}: {tensor.name} and {self._by_name[name].name} are both {name}"
                    )
                self._by_name[name] = part
            if len(self._by_name) > _MAX_TENSORS:
                raise InvalidCheckpoint(f"{self._header.path}: more than {_MAX_TENSORS} tensors and experts")

    @property
    def path(self) -> Path:
        """The file that holds the metadata: the first, where there are several."""
        return self._header.path

    @property
    def files(self) -> list[Path]:
        return sorted({self.path, *(tensor.path for tensor in self._by_name.values())})

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._header.metadata

    @cached_property
    def config(self) -> dict[str, Any]:
        factors = self._header.tensors.get(ROPE_FACTORS)
        return config_from_gguf(self._header, None if factors is None else self._values(factors).tolist())

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(tensor.shape, _PLAIN.get(tensor.type, np.dtype("float32")).name)
            for name, tensor in self._by_name.items()
        }

    def read(self, name: str) -> Array:
        tensor = self._by_name[name]
        values = self._values(tensor)
        if self._architecture.adds_one_to_norms and tensor.name.endswith("norm.weight"):
            return np.subtract(values, 1, dtype=values.dtype)
        return self._in_order(tensor, values)

    def read_blocks(self, name: str) -> Array | None:
        tensor = self._by_name[name]
        if tensor.type not in _IN_BLOCKS:
            return None
        blocks = _IN_BLOCKS[tensor.type](self._bytes(tensor))
        if blocks is None or blocks["codes"].min() < -127:  # no quantiser writes these, but a file can hold them
            return None
        # Moved as bytes: field by field takes nine times as long.
        rows = blocks.view(f"V{BLOCK.itemsize}").reshape(*tensor.shape[:-1], -1)
        return self._in_order(tensor, rows).view(BLOCK)

    def _parts(self, tensor: GGUFTensor) -> Iterator[tuple[str, GGUFTensor]]:
        """The tensor under its Hugging Face name, or the matrix of each expert. An unknown one keeps its name, and is
        reported as one too many."""
        if self._architecture.expert_name(tensor.name, 0) is None:
            yield self._architecture.hugging_face_name(tensor.name) or tensor.name, tensor
            return
        if len(tensor.shape) != 3 or tensor.shape[0] > MAX_EXPERTS:
            raise InvalidCheckpoint(
                f"{tensor.path}: tensor {tensor.name} has the shape {list(tensor.shape)}; "
                f"[experts, outputs, inputs] is needed, and at most {MAX_EXPERTS} experts"
            )
        for expert, matrix in enumerate(tensor.matrices()):
            name = self._architecture.expert_name(tensor.name, expert)
            assert name is not None
            yield name, matrix

    def _in_order(self, tensor: GGUFTensor, values: Array) -> Array:
        """The rows of a tensor as Hugging Face orders them."""
        if self._architecture.interleaves_heads and ".attn_q." in tensor.name:
            return _halves_of_heads(values, self.config["num_attention_heads"])
        if self._architecture.interleaves_heads and ".attn_k." in tensor.name:
            return _halves_of_heads(values, self.config["num_key_value_heads"])
        return values

    def _values(self, tensor: GGUFTensor) -> Array:
        if tensor.type in _PLAIN:
            return _mapped(tensor, _PLAIN[tensor.type], tensor.shape)
        return dequantize(self._bytes(tensor), tensor.type).reshape(tensor.shape)

    def _bytes(self, tensor: GGUFTensor) -> Array:
        return _mapped(tensor, np.uint8, (tensor.num_bytes,))

    def _refuse_types(self) -> None:
        by_type: dict[str, list[str]] = {}
        for tensor in self._header.tensors.values():
            if tensor.type not in _PLAIN and tensor.type not in _QUANTIZED:
                by_type.setdefault(tensor.type, []).append(tensor.name)
        if by_type:
            found = "; ".join(f"{kind} ({len(names)}, first {names[0]})" for kind, names in by_type.items())
            supported = ", ".join((*_PLAIN, *_QUANTIZED))
            raise UnsupportedModel(f"{self._header.path}: tensor types not supported: {found}; supported: {supported}")


def _mapped(tensor: GGUFTensor, dtype: Any, shape: tuple[int, ...]) -> Array:
    with open_regular(tensor.path) as file:
        return np.memmap(file, dtype, "r", tensor.offset, shape)


def dequantize(data: Array, type_: str) -> Array:
    """All blocks of a quantised tensor as one flat float32 array, in chunks spread over threads."""
    import gguf

    kind = gguf.GGMLQuantizationType[type_]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    values = np.empty((len(blocks), block_size), np.float32)
    step = _CHUNK_ELEMENTS // block_size

    def fill(start: int) -> None:
        chunk = blocks[start : start + step]
        # One long row: the package works through sixteen rows at a time, which is slow for short ones.
        values[start : start + step] = gguf.quants.dequantize(chunk.reshape(1, -1), kind).reshape(-1, block_size)

    _for_each(fill, range(0, len(blocks), step))
    return values.reshape(-1)


def _blocks_of_q4_0(data: Array) -> Array:
    """Each number is its four bits less 8, times the scale: the low halves of all bytes come first."""
    half = BLOCK_SIZE // 2
    packed = data.view(np.dtype([("scale", "<f2"), ("pairs", "u1", half)]))
    blocks = np.empty(len(packed), BLOCK)
    step = _CHUNK_ELEMENTS // BLOCK_SIZE

    def fill(start: int) -> None:
        part, to = packed[start : start + step], blocks[start : start + step]
        to["scale"] = part["scale"]
        to["codes"][:, :half] = (part["pairs"] & 15).view(np.int8) - 8
        to["codes"][:, half:] = (part["pairs"] >> 4).view(np.int8) - 8

    _for_each(fill, range(0, len(blocks), step))
    return blocks


def _blocks_of_mxfp4(data: Array) -> Array | None:
    """Each number is a float of four bits, of which the double is an integer, times a power of two; None where a half
    of that power is no float16. The low halves of all bytes come first."""
    half = BLOCK_SIZE // 2
    packed = data.view(np.dtype([("exponent", "u1"), ("pairs", "u1", half)]))
    exponents = packed["exponent"]
    if exponents.min() < _MXFP4_EXPONENTS[0] or exponents.max() > _MXFP4_EXPONENTS[1]:
        return None
    blocks = np.empty(len(packed), BLOCK)
    step = _CHUNK_ELEMENTS // BLOCK_SIZE

    def fill(start: int) -> None:
        part, to = packed[start : start + step], blocks[start : start + step]
        to["scale"] = np.ldexp(np.float32(1), part["exponent"].astype(np.int32) - 128)
        to["codes"][:, :half] = _MXFP4_DOUBLES[part["pairs"] & 15]
        to["codes"][:, half:] = _MXFP4_DOUBLES[part["pairs"] >> 4]

    _for_each(fill, range(0, len(blocks), step))
    return blocks


_MXFP4_EXPONENTS = 128 - 24, 128 + 15  # of the least and the largest power of two that float16 has
_MXFP4_DOUBLES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
# The types in blocks of 32 codes of at most eight bits, each with a scale and nothing to add.
_IN_BLOCKS: dict[str, Callable[[Array], Array | None]] = {
    "Q8_0": lambda data: data.view(BLOCK),
    "Q4_0": _blocks_of_q4_0,
    "MXFP4": _blocks_of_mxfp4,
}


def _for_each(fill: Callable[[int], None], starts: range) -> None:
    """Run `fill` for each start, in threads if there are several."""
    if len(starts) > 1:
        with ThreadPoolExecutor(min(_MAX_THREADS, num_processors())) as pool:
            for _ in pool.map(fill, starts):
                pass
    else:
        fill(starts[0])


def _halves_of_heads(values: Array, num_heads: int) -> Array:
    """Rows from llama.cpp's order (0, n/2, 1, n/2 + 1, …) within each head of n back to Hugging Face's."""
    shape = values.shape
    pairs = values.reshape(num_heads, shape[0] // num_heads // 2, 2, prod(shape[1:]))
    return pairs.swapaxes(1, 2).reshape(shape)
