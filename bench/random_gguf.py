"""A GGUF file with the fields, shapes and types of another and random numbers, which take as long to compute with.

python bench/random_gguf.py ~/.cache/quire/SmolLM2-135M-Instruct.Q4_1.gguf random.gguf
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES

# By type: the float16 numbers that a block begins with, its scale and its least number.
SCALES = {GGMLQuantizationType.Q8_0: (0.0004,), GGMLQuantizationType.Q4_1: (0.006, -0.045)}


def random_bytes(kind: GGMLQuantizationType, count: int, chance: np.random.Generator) -> Any:
    """The bytes of a tensor, or of a norm's weights: ones."""
    if kind == GGMLQuantizationType.F32:
        return np.ones(count // 4, np.float32)
    if kind not in SCALES:
        raise SystemExit(f"{kind.name} is not among {', '.join(one.name for one in SCALES)} and F32")
    _, size = GGML_QUANT_SIZES[kind]
    blocks = chance.integers(0, 256, (count // size, size), np.uint8)
    first = np.frombuffer(np.asarray(SCALES[kind], np.float16).tobytes(), np.uint8)
    blocks[:, : len(first)] = first
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    tensors, chance = GGUFReader(given.file).tensors, np.random.default_rng(0)
    with given.file.open("rb") as source, given.out.open("wb") as out:
        out.write(source.read(min(int(tensor.data_offset) for tensor in tensors)))
        for tensor in tensors:
            out.seek(int(tensor.data_offset))
            out.write(random_bytes(tensor.tensor_type, int(tensor.n_bytes), chance).tobytes())


if __name__ == "__main__":
    main()
