"""Experts of four bits give what their definition gives, and stay in four bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.errors import InvalidCheckpoint, InvalidSetting, UnsupportedModel
from quire.files.model_files import locate
from quire.models.checkpoint import load_weights, weights_like
from quire.models.formats.quantized_source import QuantizedSource, open_checkpoint, read_quantization
from quire.models.params import ParamTree
from quire.models.parts.decoder import Decoder
from quire.models.registry import build_model
from quire.ops.weights.coded import Coded
from quire.settings.config import Config
from quire.settings.dtypes import resolve_quantize
from tests.models.cases import CASES
from tests.models.mxfp4_checkpoint import CONFIG, write_mxfp4
from tests.models.test_quantized import on_first_device
from tests.models.tiny import prompt, relative_error, whole_logits

TOKENS = prompt(12, CONFIG["vocab_size"])
AT = "model.layers.1.mlp.experts.down_proj"


def loaded(folder: Path, **how: Any) -> tuple[Decoder, ParamTree]:
    files = locate(str(folder))
    model, source = build_model(files.config), open_checkpoint(files)
    assert source is not None
    return model, load_weights(model, source, **{"dtype": "float32", **how})


@pytest.mark.parametrize("how", [{}, {"placement": on_first_device}], ids=["native", "plain"])
def test_logits_are_those_of_the_numbers_that_the_codes_stand_for(how: dict[str, Any], tmp_path: Path) -> None:
    model, weights = loaded(write_mxfp4(tmp_path), **how)
    expected = whole_logits(*loaded(tmp_path / "plain", **how), TOKENS)
    assert relative_error(whole_logits(model, weights, TOKENS), expected) < 1e-5
    for layer in weights["layers"]:
        for name in ("gate_up", "down"):
            weight = layer["feed_forward"][name]
            assert isinstance(weight, Coded)
            held = sum(array.nbytes for array in jax.tree.leaves(weight))
            assert held == np.prod(weight.shape) * 4.25 / 8  # bits, and a byte for 32


def test_its_own_name_leaves_the_checkpoint_as_it_is(tmp_path: Path) -> None:
    source, asked = open_checkpoint(locate(str(write_mxfp4(tmp_path)))), Config(quantize="mxfp4")
    assert isinstance(source, QuantizedSource)
    assert resolve_quantize("cpu", asked, fast_int8=True, quantization=source.quantization.summary).value == "none"
    for other, is_what in ((None, "not quantised"), ("gptq, 4 bits", "gptq, 4 bits")):
        with pytest.raises(InvalidSetting, match=f"quantize is 'mxfp4'; the checkpoint is {is_what}"):
            resolve_quantize("cpu", asked, fast_int8=True, quantization=other)


def test_sizes_are_known_before_weights_are_read(tmp_path: Path) -> None:
    files = locate(str(write_mxfp4(tmp_path)))
    model, source = build_model(files.config), open_checkpoint(files)
    assert isinstance(source, QuantizedSource)
    weights = load_weights(model, source, dtype="bfloat16", placement=on_first_device)
    like = weights_like(model, source, dtype="bfloat16")
    same = jax.tree.map(lambda one, array: (one.shape, one.dtype) == (array.shape, array.dtype), like, weights)
    assert jax.tree.all(same)


def place(at: int, value: int) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array = array.copy()
        array.reshape(-1)[at] = value
        return array

    return change


@pytest.mark.parametrize(
    ("suffix", "change", "problem"),
    [
        ("scales", None, "scales is missing"),
        ("blocks", None, "blocks is missing"),
        ("scales", lambda a: a[:, :, :1], "scales is [6, 96, 1]; by its quantisation it is [6, 96, 2]"),
        ("scales", lambda a: a.astype(np.int8), "scales is int8"),
        ("scales", place(5, 255), "scales has exponents of 255, which stand for no number"),
        ("blocks", lambda a: a[..., :8], "blocks is [6, 96, 2, 8]; [experts, outputs, blocks, 16] is needed"),
        ("blocks", lambda a: a.reshape(6, 96, -1), "blocks is [6, 96, 32]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    suffix: str, change: Callable[[Any], Any] | None, problem: str, tmp_path: Path
) -> None:
    file = write_mxfp4(tmp_path) / "model.safetensors"
    arrays = load_file(file)
    array = arrays.pop(f"{AT}_{suffix}")
    if change is not None:
        arrays[f"{AT}_{suffix}"] = np.ascontiguousarray(change(array))
    save_file(arrays, file)
    with pytest.raises(InvalidCheckpoint) as refusal:
        loaded(file.parent)
    assert f"{AT}_{problem}" in str(refusal.value)


def test_other_families_are_refused_by_name() -> None:
    config = {**CASES["mixtral"], "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UnsupportedModel, match=r"mixtral: quantization_config\.quant_method = 'mxfp4'"):
        read_quantization(config)


@pytest.mark.parity
def test_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = write_mxfp4(tmp_path)
    stored = load_file(folder / "model.safetensors")
    blocks, scales = (torch.from_numpy(stored[f"{AT}_{suffix}"]) for suffix in ("blocks", "scales"))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()  # [experts, inputs, outputs]
    source = open_checkpoint(locate(str(folder)))
    assert source is not None
    experts, inputs, outputs = theirs.shape
    ours = source.read(AT).reshape(experts, outputs, inputs)
    assert np.array_equal(ours, theirs.transpose(0, 2, 1))
