"""Checkpoints of ModelOpt, in each of the places and shapes in which it says what they are."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import InvalidCheckpoint, QuireError, UnsupportedModel
from quire.files.model_files import locate
from quire.models.checkpoint import load_weights
from quire.models.formats.compressed_matrix import CompressedMatrix
from quire.models.formats.four_bit_floats import FourBitFloats
from quire.models.formats.quantized_source import QuantizedSource, open_checkpoint, read_quantization
from quire.models.registry import build_model
from tests.golden.make_modelopt import CASES, FOLDER
from tests.models.quantized_checkpoints import FORMATS, Format, write_checkpoint
from tests.models.quantized_matrices import Array, Matrix
from tests.models.test_quantized_checkpoints import LLAMA, assert_logits, coded
from tests.models.tiny import relative_error, whole_logits

FP8 = FORMATS["modelopt-fp8"]


def opened(folder: Path) -> QuantizedSource:
    source = open_checkpoint(locate(str(folder)))
    assert isinstance(source, QuantizedSource)
    return source


def logits(folder: Path) -> Array:
    expected = json.loads((folder / "expected.json").read_text())
    model = build_model(locate(str(folder)).config)
    return whole_logits(model, load_weights(model, opened(folder), dtype="float32"), expected["tokens"])


def copied(name: str, folder: Path, quantization: dict[str, Any] | None) -> Path:
    """A checkpoint of ModelOpt with another `quantization_config`."""
    shutil.copytree(FOLDER / name, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    more = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_modelopt(name: str) -> None:
    expected = json.loads((FOLDER / name / "expected.json").read_text())
    assert relative_error(logits(FOLDER / name), np.array(expected["logits"], np.float32)) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_a_file_beside_the_config_says_the_same(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path / "a", None)
    assert opened(folder).quantization == opened(FOLDER / name).quantization
    np.testing.assert_array_equal(logits(folder), logits(FOLDER / name))


@pytest.mark.parametrize("name", CASES)
def test_the_config_may_hold_that_file(name: str, tmp_path: Path) -> None:
    whole = json.loads((FOLDER / name / "hf_quant_config.json").read_text())
    for at, inner in (("a", whole), ("b", whole["quantization"])):
        folder = copied(name, tmp_path / at, {"quant_method": "modelopt", **inner})
        (folder / "hf_quant_config.json").unlink()
        assert opened(folder).quantization == opened(FOLDER / name).quantization


@pytest.mark.parametrize("content", ["{}", '{"quantization": {}}', '{"quantization": {"quant_algo": null}}'])
def test_a_folder_with_the_file_is_never_read_as_if_it_were_not_quantised(content: str, tmp_path: Path) -> None:
    folder = copied("modelopt-fp8", tmp_path / "a", None)
    (folder / "hf_quant_config.json").write_text(content)
    with pytest.raises(InvalidCheckpoint, match=r"quant_algo is missing"):
        open_checkpoint(locate(str(folder)))
    (folder / "hf_quant_config.json").write_text("[]")
    with pytest.raises(InvalidCheckpoint, match=r"hf_quant_config\.json: holds a list, not an object"):
        locate(str(folder))


def test_the_config_goes_before_the_file(tmp_path: Path) -> None:
    folder = copied("modelopt-fp8", tmp_path / "a", {"quant_method": "quip"})
    with pytest.raises(UnsupportedModel, match="quant_method = 'quip' is not supported"):
        open_checkpoint(locate(str(folder)))


@pytest.mark.parametrize(
    ("wildcard", "number"),
    [("model.layers.1.*", 4), ("*.self_attn.?_proj", 4), ("model.layers.0.mlp.down_proj", 7), ("*_proj", 0)],
)
def test_wildcards_say_what_is_left_alone(wildcard: str, number: int, tmp_path: Path) -> None:
    kept = {
        "model.layers.1.*": ("layers.1.",),
        "*.self_attn.?_proj": ("self_attn",),
        "model.layers.0.mlp.down_proj": ("layers.0.mlp.down_proj",),
        "*_proj": ("_proj",),
    }[wildcard]
    format_ = Format({**FP8.config, "ignore": ["lm_head", wildcard]}, FP8.make)
    assert len(coded(assert_logits(write_checkpoint(tmp_path / "a", LLAMA, format_, ignored=kept)))) == number
    write_checkpoint(tmp_path / "b", LLAMA, format_)
    with pytest.raises(InvalidCheckpoint, match=r"extra: .*_scale|is float8_e4m3fn"):
        load_weights(build_model(LLAMA), opened(tmp_path / "b"), dtype="float32")


def test_each_layer_may_have_an_algorithm_of_its_own(tmp_path: Path) -> None:
    by_channel = FORMATS["modelopt-fp8-channels"]
    layers = {}
    for layer in range(2):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
            algorithm = "FP8" if "self_attn" in name else "FP8_PER_CHANNEL_PER_TOKEN"
            layers[f"model.layers.{layer}.{name}"] = {"quant_algo": algorithm}

    def make(module: str, weight: Array) -> Matrix:
        return (FP8 if layers[module]["quant_algo"] == "FP8" else by_channel).make(module, weight)

    config = {**FP8.config, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    weights = assert_logits(write_checkpoint(tmp_path, LLAMA, Format(config, make), ignored=("gate_proj", "up_proj")))
    assert [one.input_scale is None for one in coded(weights["layers"][0])] == [False, False, True]  # out, qkv, down
    words = "modelopt, fp8 in one scale for a matrix, static fp8 activations and fp8 in a scale for each output, "
    assert opened(tmp_path).quantization.summary == f"{words}dynamic fp8 activations"


def test_all_experts_of_a_layer_may_have_one_entry() -> None:
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    layers |= {"model.layers.0.mlp.experts.1.down_proj": {"quant_algo": "FP8"}}
    config = {"quant_method": "modelopt_fp4", "quant_algo": "mixed_precision", "quantized_layers": layers}
    found = read_quantization({**LLAMA, "quantization_config": config})
    assert found is not None
    whole = found.format_of("model.layers.0.mlp.experts.1.up_proj")
    assert isinstance(whole, FourBitFloats)
    assert isinstance(found.format_of("model.layers.0.mlp.experts.1.down_proj"), CompressedMatrix)
    assert found.format_of("model.layers.0.mlp.gate") is None
    assert found.format_of("lm_head") is None


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, None),
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": None, "kv_cache_scheme": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "INT8"}, "int8"),
        ({"kv_cache_quant_algo": ""}, None),
        ({"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
    ],
)
def test_the_cache_has_the_type_that_is_asked_for(fields: dict[str, Any], dtype: str | None) -> None:
    quantization = read_quantization({**LLAMA, "quantization_config": {**FP8.config, **fields}})
    assert quantization is not None
    assert quantization.cache_dtype == dtype
    assert ("the cache alone" in quantization.summary) == (fields.get("quant_algo", "") is None)


def test_scales_of_keys_and_values_need_a_scheme(tmp_path: Path) -> None:
    whole = json.loads((FOLDER / "modelopt-fp8-and-cache" / "hf_quant_config.json").read_text())
    whole["quantization"]["kv_cache_quant_algo"] = None
    folder = copied("modelopt-fp8-and-cache", tmp_path / "a", {"quant_method": "modelopt", **whole})
    with pytest.raises(InvalidCheckpoint, match=r"2 extra: model\.layers\.0\.self_attn\.k_proj\.k_scale"):
        logits(folder)


GROUP = {"targets": ["Linear"], "weights": {"dynamic": False, "num_bits": 8, "type": "float"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "quant_algo = 'W4A16_AWQ' is not supported: known are FP8, FP8_PER_CHANNEL"),
        ({"quant_algo": 8}, "quant_algo = 8: a string is needed"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers = None: MIXED_PRECISION needs"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT3"}}},
            "quantized_layers.a.quant_algo = 'INT3' is not supported",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4", "encoding": "csf"}}},
            "quantized_layers.a.encoding = 'csf' is not supported",
        ),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 8}}, "quantized_layers.a = 8: an object"),
        ({"pre_quant_scale": True}, "pre_quant_scale = True is not supported"),
        ({"quantization": {"quant_algo": "FP8", "rotation": 1}}, "quantization.rotation = 1 is not supported"),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo = 'NVFP4' is not supported: known are FP8 and INT8"),
        ({"kv_cache_scheme": "NVFP4"}, "kv_cache_scheme = 'NVFP4' is not supported"),
        ({"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme.num_bits = 4"),
        ({"ignore": "lm_head"}, "ignore = 'lm_head': a list of strings"),
        ({"exclude_modules": ["*" * 501]}, "exclude_modules = "),
        ({"config_groups": {"a": {**GROUP, "weights": {"num_bits": 4}}}}, "config_groups.a.weights.num_bits = 4"),
        ({"config_groups": {"a": {**GROUP, "weights": {"type": "int"}}}}, "config_groups.a.weights.type = 'int'"),
        ({"config_groups": {"a": {**GROUP, "lora_rank": 8}}}, "config_groups.a.lora_rank = 8"),
        ({"quant_algo": "FP8_PB_WO", "group_size": 0}, "group_size = 0"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_field_and_value(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(QuireError) as refusal:
        read_quantization({**LLAMA, "quantization_config": {**FP8.config, **fields}})
    assert named in str(refusal.value)


def test_many_stars_take_no_time() -> None:
    config = {**FP8.config, "ignore": ["*a" * 200 + "b"]}
    quantization = read_quantization({**LLAMA, "quantization_config": config})
    assert quantization is not None
    assert quantization.format_of("a" * 400) is not None
