"""Checkpoints that compressed-tensors wrote, against the model that it runs in torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.files.model_files import locate
from quire.models.checkpoint import load_weights
from quire.models.formats.quantized_source import QuantizedSource, open_checkpoint
from quire.models.registry import build_model
from tests.golden.make import reference_model
from tests.models.cases import CASES
from tests.models.tiny import prompt, whole_logits

pytestmark = pytest.mark.parity

LLAMA = CASES["llama"]
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
TOKEN = {"dynamic": True, "strategy": "token"}
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "fp8 static": ({**FP8, "strategy": "tensor"}, {**FP8, "strategy": "tensor"}),
    "fp8 dynamic": ({**FP8, "strategy": "channel"}, {**FP8, **TOKEN}),
    "fp8 blocks": (
        {**FP8, "strategy": "block", "block_structure": [16, 16]},
        {**FP8, "strategy": "group", "group_size": 16, "dynamic": True},
    ),
    "int8": ({**INT8, "strategy": "channel"}, {**INT8, **TOKEN}),
    "int8 asymmetric": ({**INT8, "strategy": "channel"}, {**INT8, **TOKEN, "symmetric": False}),
    "int4": ({**INT4, "symmetric": True}, None),
    "int4 asymmetric": ({**INT4, "symmetric": False}, None),
    "int4 and int8": ({**INT4, "symmetric": True}, {**INT8, **TOKEN}),
    "int8 weights": ({**INT8, "strategy": "channel", "symmetric": False}, None),
}


def quantised(model: Any, weights: dict[str, Any], activations: dict[str, Any] | None) -> Any:
    """The model with the scales of its weights' least and largest numbers; rounded on the fly, not yet stored."""
    import torch
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quantization_status": "frozen"}
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        weight = module.weight.data
        rows, columns = weight.shape
        shape = {
            "tensor": (1, rows, 1, columns),
            "channel": (rows, 1, 1, columns),
            "group": (rows, 1, columns // 16, 16),
            "block": (rows // 16, 16, columns // 16, 16),
        }[scheme.weights.strategy]
        parts = weight.reshape(shape)
        scale, zero = calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), scheme.weights)
        with torch.no_grad():
            module.weight_scale.copy_(scale.reshape(module.weight_scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.copy_(zero.reshape(module.weight_zero_point.shape))
            if hasattr(module, "input_scale"):
                module.input_scale.fill_(0.02)
    return model


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    import torch
    from compressed_tensors.compressors import ModelCompressor

    tokens = prompt(12, LLAMA["vocab_size"])
    theirs = quantised(reference_model(LLAMA, tmp_path / "plain"), *SCHEMES[name])
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    compressor = ModelCompressor.from_pretrained_model(theirs)
    assert compressor is not None
    compressor.compress_model(theirs)
    folder = tmp_path / "stored"
    theirs.save_pretrained(folder)
    compressor.update_config(folder)

    files = locate(str(folder))
    model, source = build_model(files.config), open_checkpoint(files)
    assert isinstance(source, QuantizedSource)
    got = whole_logits(model, load_weights(model, source, dtype="float32"), tokens)
    errors = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
    # An activation halfway between two codes may get either: that token, and those that attend to it, differ slightly.
    assert (errors < 1e-4).sum() >= len(tokens) // 3, errors
    assert errors.max() < 0.03, errors
