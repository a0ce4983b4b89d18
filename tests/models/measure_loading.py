"""Measures the memory that loading takes, in its own process: python -m tests.models.measure_loading FOLDER DTYPE"""

import json
import sys
from pathlib import Path

import jax

from quire.files.model_files import locate
from quire.models.checkpoint import load_weights
from quire.models.formats.quantized_source import open_checkpoint
from quire.models.registry import build_model


def memory_bytes(field: str) -> int:
    """VmRSS: resident now; VmHWM: the most there was, in this process alone."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def main(model_path: str, dtype: str) -> None:
    files = locate(model_path)
    model = build_model(files.config)
    source = open_checkpoint(files)
    assert source is not None
    jax.device_put(0.0).block_until_ready()  # the client itself is no part of loading
    before = memory_bytes("VmRSS")
    weights = jax.tree.leaves(load_weights(model, source, dtype=dtype))
    peak = memory_bytes("VmHWM")
    placed = sum(weight.nbytes for weight in weights)
    largest = max(weight.nbytes for weight in weights)
    print(json.dumps({"placed": placed, "largest": largest, "besides": peak - before - placed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
