"""The schemes of `bench/quality.py` in torch, through the model of transformers: the numbers to be no worse than.

Nothing is shared with Quire but the token ids: codes, scales and products are torch's, and W4A16 is that of the library
compressed-tensors. `make test-parity` installs what this needs.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

Array = np.ndarray[Any, Any]
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
GROUP = 64  # of W4A16
RUN = 64  # numbers of keys that are turned together


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Numbers as e4m3 or int8 with a scale for each row."""
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST[dtype]).clamp_min(1e-30)
    codes = x / scale
    return (codes.to(torch.float8_e4m3fn).float() if dtype == "float8_e4m3fn" else codes.round()) * scale


def turned(x: torch.Tensor) -> torch.Tensor:
    """Runs of 64 numbers turned by Hadamard's matrix, which is its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < RUN:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (x.unflatten(-1, (-1, RUN)) @ matrix / RUN**0.5).flatten(-2)


class RoundedLinear(torch.nn.Module):
    """A linear layer whose weight has a scale for each output, and whose input one for each token."""

    def __init__(self, linear: torch.nn.Linear, dtype: str) -> None:
        super().__init__()
        self.weight, self.bias, self.dtype = rounded(linear.weight.data, dtype), linear.bias, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rounded(x, self.dtype), self.weight, self.bias)


class RoundedCache(DynamicCache):
    """Keys and values as a cache has them, with a scale for each token and head. Keys in int8 are turned before."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, keys: torch.Tensor, values: torch.Tensor, *others: Any, **named: Any) -> Any:
        keys = rounded(keys, self.dtype) if self.dtype != "int8" else turned(rounded(turned(keys), self.dtype))
        return super().update(keys, rounded(values, self.dtype), *others, **named)


def load(file: Path) -> Any:
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.eval()


def with_weights(model: Any, dtype: str) -> Any:
    """A copy in which every matrix of a layer is a `RoundedLinear`."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(part, name, RoundedLinear(linear, dtype))
    return model


def with_four_bits(model: Any) -> Any:
    """The model itself, changed: symmetric groups of four bits by compressed-tensors, rounded to the nearest."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    config = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quantization_status": "frozen"}
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            parts = module.weight.data.unflatten(1, (-1, GROUP))
            scale, _ = calculate_qparams(parts.amin(2), parts.amax(2), scheme.weights)
            module.weight_scale.data.copy_(scale)
    return model


def save(model: Any, folder: Path) -> None:
    """The checkpoint of a model that `with_four_bits` has changed. Its logits are to be had before."""
    from compressed_tensors.compressors import ModelCompressor

    compressor = ModelCompressor.from_pretrained_model(model)
    assert compressor is not None
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def logprobs(model: Any, windows: Array, cache: str | None = None) -> list[Array]:
    """float32 [window, vocabulary] of each window."""
    found = []
    with torch.no_grad():
        for window in windows:
            past = DynamicCache() if cache is None else RoundedCache(cache)
            logits = model(torch.from_numpy(window.astype(np.int64))[None], past_key_values=past).logits[0]
            found.append(torch.log_softmax(logits.float(), -1).numpy())
    return found
