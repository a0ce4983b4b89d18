"""GGUF files for tests, written with the package's own writer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LLAMA_METADATA: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10_000.0,
}


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, str]],
    *,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """`metadata` is of the architecture, `more` has whole keys. A tensor is float32 values and the type to store them
    as, or the bytes [rows, row bytes] of that type."""
    writer = gguf.GGUFWriter(path, architecture)
    keys = {f"{architecture}.{key}": value for key, value in metadata.items()} | dict(more or {})
    for key, value in keys.items():
        add_value(writer, key, value)
    for name, (values, type_) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_]
        data = values if values.dtype == np.uint8 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def embedding(rows: int = 8, width: int = 256) -> dict[str, tuple[np.ndarray, str]]:
    """The one tensor no file can be without."""
    values = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    return {"token_embd.weight": (values, "F32")}
