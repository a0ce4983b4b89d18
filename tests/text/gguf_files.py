"""GGUF files with a tokenizer and a few settings, and no weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf


def write_gguf(path: Path, architecture: str, metadata: Mapping[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"{architecture}.{name}", 1)
    writer.add_uint32(f"{architecture}.attention.head_count", 1)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
