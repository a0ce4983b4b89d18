"""Checkpoints that gptqmodel made, against the logits that it computes of them (tests/golden/make_quantized.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from quire.files.model_files import locate
from quire.models.checkpoint import load_weights
from quire.models.formats.packing import plus_one, unpacked
from quire.models.formats.quantized_source import QuantizedSource, open_checkpoint
from quire.models.registry import build_model
from quire.ops.weights.coded import Coded
from tests.golden.make_quantized import CASES, FOLDER
from tests.models.tiny import relative_error, whole_logits


def opened(folder: Path) -> QuantizedSource:
    source = open_checkpoint(locate(str(folder)))
    assert isinstance(source, QuantizedSource)
    return source


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_gptqmodel(name: str) -> None:
    source = opened(FOLDER / name)
    model = build_model(locate(str(FOLDER / name)).config)
    weights = load_weights(model, source, dtype="float32")
    assert isinstance(weights["layers"][0]["attention"]["qkv"], Coded)
    expected = json.loads((FOLDER / name / "expected.json").read_text())
    got = whole_logits(model, weights, expected["tokens"])
    assert relative_error(got, np.array(expected["logits"], np.float32)) < 1e-4


@pytest.mark.parametrize("name", ["gptq-4-asymmetric", "gptq-8-asymmetric"])
def test_the_files_have_zero_points_of_0_that_borrow_from_the_next(name: str) -> None:
    """Otherwise adding one to each by itself would give the same logits."""
    source, bits = opened(FOLDER / name), CASES[name]["bits"]
    words = source._source.read("model.layers.0.self_attn.q_proj.qzeros")
    count = words.shape[1] * 32 // bits
    together = unpacked(plus_one(words, bits), bits, count)
    alone = (unpacked(words, bits, count) + np.uint8(1)) & np.uint8(2**bits - 1)
    assert (together == 0).any()
    assert (together != alone).any()


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("awq")])
def test_awq_is_what_compressed_tensors_converts_it_to(name: str) -> None:
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
    from safetensors.torch import load_file

    folder = FOLDER / name
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = AutoAWQConverter.from_autoawq_config(config).process(load_file(folder / "model.safetensors"))
    source = opened(folder)
    modules = [key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")]
    assert len(modules) == 7
    for module in modules:
        shape = torch.Size(tensors[f"{module}.weight_shape"].tolist())
        scales = tensors[f"{module}.weight_scale"].float()
        zeros = tensors[f"{module}.weight_zero_point"]
        codes = unpack_from_int32(tensors[f"{module}.weight_packed"], 4, shape)
        numbers = codes.float() - unpack_from_int32(zeros, 4, scales.shape, packed_dim=0).float().repeat_interleave(
            shape[1] // scales.shape[1], 1
        )
        expected = numbers * scales.repeat_interleave(shape[1] // scales.shape[1], 1)
        np.testing.assert_array_equal(source.read(f"{module}.weight"), expected.numpy())
