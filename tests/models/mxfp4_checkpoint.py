"""Writes tiny checkpoints of gpt_oss with experts of four bits, and knows what they stand for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quire.models.checkpoint import leaves
from quire.models.registry import build_model
from tests.models.cases import CASES
from tests.models.tiny import named_tensor

Array = np.ndarray[Any, Any]

CONFIG = {**CASES["gpt_oss"], "intermediate_size": 64, "hidden_size": 96}
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def drawn(name: str, experts: int, outputs: int, inputs: int) -> tuple[Array, Array, Array]:
    """Blocks, scales, and the numbers [experts, outputs, inputs] that they stand for, worked out one by one."""
    rng = np.random.default_rng(len(name))
    codes = rng.integers(0, 16, (experts, outputs, inputs // 32, 32))
    scales = rng.integers(120, 126, (experts, outputs, inputs // 32))
    wide = np.asarray([*VALUES, *(-value for value in VALUES)])[codes] * 2.0 ** (scales[..., None] - 127)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    return blocks.astype(np.uint8), scales.astype(np.uint8), wide.reshape(experts, outputs, inputs).astype(np.float32)


def write_mxfp4(folder: Path, config: Mapping[str, Any] = CONFIG) -> Path:
    """Beside the checkpoint `coded` in the folder there is `plain`, the same with its experts in float32."""
    coded: dict[str, Array] = {}
    plain: dict[str, Array] = {}
    for param in leaves(build_model(config).params()):
        for tensor in param.sources:
            if tensor.name.endswith((".gate_up_proj", ".down_proj")):
                experts, inputs, outputs = tensor.shape
                blocks, scales, wide = drawn(tensor.name, experts, outputs, inputs)
                coded |= {f"{tensor.name}_blocks": blocks, f"{tensor.name}_scales": scales}
                plain[tensor.name] = np.ascontiguousarray(wide.transpose(0, 2, 1))
            else:
                coded[tensor.name] = plain[tensor.name] = named_tensor(tensor.name, tensor.shape)
    for name, tensors, extra in (("coded", coded, {"quantization_config": QUANTIZATION}), ("plain", plain, {})):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps({**config, **extra}))
        save_file(tensors, folder / name / "model.safetensors")
    return folder / "coded"
