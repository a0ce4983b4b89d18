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
from tests.models.tiny import PagedRun, prompt, whole_logits

pytestmark = pytest.mark.parity

LLAMA = {**CASES["llama"], "intermediate_size": 64}  # whole groups of 32
TOKENS = prompt(12, LLAMA["vocab_size"])
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "float8_e4m3fn"}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8"}
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
    "nvfp4": (NVFP4, {**NVFP4, "dynamic": "local"}),
    "nvfp4 weights": (NVFP4, None),
    "mxfp4": (MXFP4, {**MXFP4, "dynamic": True}),
    "mxfp4 weights": (MXFP4, None),
    "mxfp4 and fp8": (MXFP4, {**FP8, **TOKEN}),
    "int8 weights": ({**INT8, "strategy": "channel", "symmetric": False}, None),
}


def quantised(
    model: Any, weights: dict[str, Any], activations: dict[str, Any] | None, cache: dict[str, Any] | None = None
) -> Any:
    """The model with the scales of its weights' least and largest numbers; rounded on the fly, not yet stored."""
    import torch
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quantization_status": "frozen"}
    config["kv_cache_scheme"] = cache
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        if hasattr(module, "k_scale"):
            for scale in (module.k_scale, module.v_scale):
                torch.nn.init.constant_(scale, 0.02)  # reaches 9
            continue
        weight = module.weight.data
        rows, columns = weight.shape
        size = scheme.weights.group_size or 16
        shape = {
            "tensor": (1, rows, 1, columns),
            "channel": (rows, 1, 1, columns),
            "group": (rows, 1, columns // size, size),
            "tensor_group": (rows, 1, columns // size, size),
            "block": (rows // 16, 16, columns // 16, 16),
        }[scheme.weights.strategy]
        parts = weight.reshape(shape)
        over = generate_gparam(weight.min(), weight.max()) if hasattr(module, "weight_global_scale") else None
        scale, zero = calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), scheme.weights, over)
        with torch.no_grad():
            for name, value in (("weight_global_scale", over), ("input_global_scale", 300.0)):
                if hasattr(module, name):
                    getattr(module, name).copy_(torch.as_tensor(value))
            module.weight_scale.copy_(scale.reshape(module.weight_scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.copy_(zero.reshape(module.weight_zero_point.shape))
            if hasattr(module, "input_scale"):
                module.input_scale.fill_(0.02)
    return model


def stored(model: Any, folder: Path) -> QuantizedSource:
    from compressed_tensors.compressors import ModelCompressor

    compressor = ModelCompressor.from_pretrained_model(model)
    assert compressor is not None
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    source = open_checkpoint(locate(str(folder)))
    assert isinstance(source, QuantizedSource)
    return source


def logits_of(model: Any) -> np.ndarray[Any, Any]:
    import torch

    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    theirs = quantised(reference_model(LLAMA, tmp_path / "plain"), *SCHEMES[name])
    expected = logits_of(theirs)
    source, model = stored(theirs, tmp_path / "stored"), build_model(LLAMA)
    got = whole_logits(model, load_weights(model, source, dtype="float32"), TOKENS)
    errors = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
    # An activation halfway between two codes may get either: that token, and those that attend to it, differ slightly.
    assert (errors < 1e-4).sum() >= len(TOKENS) // 3, errors
    assert errors.max() < 0.03, errors


def test_a_cache_has_the_type_of_the_scheme_and_is_as_exact_as_with_its_scales(tmp_path: Path) -> None:
    weights, _ = SCHEMES["int8 weights"]
    exact = logits_of(quantised(reference_model(LLAMA, tmp_path / "a"), weights, None))
    theirs = quantised(reference_model(LLAMA, tmp_path / "b"), weights, None, {**FP8, "strategy": "tensor"})
    their_error = np.sqrt(np.mean((logits_of(theirs) - exact) ** 2))
    source, model = stored(theirs, tmp_path / "stored"), build_model(LLAMA)
    assert source.quantization.cache_dtype == "fp8_e4m3"
    run = PagedRun(model, load_weights(model, source, dtype="float32"), len(TOKENS), "float8_e4m3fn")
    our_error = np.sqrt(np.mean((run.prefill(TOKENS) - exact) ** 2))
    assert 0 < our_error < 1.1 * their_error
