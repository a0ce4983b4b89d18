"""Small adapters, written as PEFT writes them, and the weights that they stand for."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quire.files.tensor_source import TensorInfo, TensorSource
from quire.models.adapters import adapted_layers
from quire.models.checkpoint import leaves
from quire.models.model import Model

Array = np.ndarray[Any, Any]


def modules_of(model: Model) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each module that can be adapted."""
    sizes = {}
    for param in (param for layer in adapted_layers(model) for param in leaves(layer)):
        for tensor in param.sources:
            outputs, inputs = reversed(tensor.shape) if param.transposes else tensor.shape
            sizes[tensor.name.removesuffix(".weight")] = inputs, outputs
    return sizes


def write_adapter(
    folder: Path,
    model: Model,
    *,
    seed: int = 0,
    rank: int = 3,
    alpha: float = 4,
    only: str = "",
    tensors: Mapping[str, Array | None] | None = None,
    **config: Any,
) -> Path:
    """An adapter of the modules whose names end in `only`. `tensors` are added, or left out where they are None."""
    rng = np.random.default_rng(seed)
    stored: dict[str, Array] = {}
    names = []
    for module, (inputs, outputs) in modules_of(model).items():
        if module.endswith(only):
            names.append(module)
            a, b = rng.standard_normal((rank, inputs)), rng.standard_normal((outputs, rank))
            stored[f"base_model.model.{module}.lora_A.weight"] = (a / math.sqrt(inputs)).astype(np.float32)
            stored[f"base_model.model.{module}.lora_B.weight"] = (b / math.sqrt(rank)).astype(np.float32)
    for name, tensor in (tensors or {}).items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "use_dora": False}
    fields |= {"target_modules": sorted({name.rpartition(".")[2] for name in names}), "modules_to_save": None}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


class Merged:
    """A checkpoint with an adapter's changes added to its tensors: scale * b a."""

    def __init__(self, base: TensorSource, model: Model, adapter: Path, scale: float) -> None:
        from safetensors.numpy import load_file

        self._base, self._scale = base, scale
        self._changes = load_file(adapter / "adapter_model.safetensors")
        self._is_transposed = {
            tensor.name: param.transposes for param in leaves(model.params()) for tensor in param.sources
        }

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._base.tensors()

    def read(self, name: str) -> Array:
        weight = self._base.read(name)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in self._changes:
            return weight
        a, b = (self._changes[f"{module}.lora_{part}.weight"].astype(np.float64) for part in "AB")
        change = self._scale * (b @ a)
        return (weight + (change.T if self._is_transposed[name] else change)).astype(np.float32)
