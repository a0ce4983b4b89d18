"""Checkpoints of AutoRound: the packings that it writes, and layers with bits of their own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import InvalidCheckpoint, QuireError
from quire.files.model_files import locate
from quire.models.checkpoint import load_weights
from quire.models.formats.auto_round import PACKINGS
from quire.models.formats.awq import AWQ
from quire.models.formats.gptq import GPTQ
from quire.models.formats.quantized_source import QuantizedSource, open_checkpoint, read_quantization
from quire.models.registry import build_model
from tests.golden.make_auto_round import CASES, FOLDER
from tests.models.quantized_checkpoints import FORMATS, Format, write_checkpoint
from tests.models.quantized_matrices import Array, Matrix, gptq
from tests.models.test_quantized_checkpoints import LLAMA, assert_logits, coded
from tests.models.tiny import relative_error, whole_logits

CONFIG = FORMATS["auto-round"].config


def read(**fields: Any) -> Any:
    return read_quantization({**LLAMA, "quantization_config": {**CONFIG, **fields}})


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_auto_round(name: str) -> None:
    files = locate(str(FOLDER / name))
    source, model = open_checkpoint(files), build_model(files.config)
    assert isinstance(source, QuantizedSource)
    expected = json.loads((FOLDER / name / "expected.json").read_text())
    got = whole_logits(model, load_weights(model, source, dtype="float32"), expected["tokens"])
    assert relative_error(got, np.array(expected["logits"], np.float32)) < 1e-5


EXTRA = {
    r".*mlp\.down_proj$": {"bits": 8, "sym": True},
    "model.layers.1.mlp.down_proj": {"bits": 16, "data_type": "float"},
    "model.layers.0.self_attn.q_proj": {"sym": False},
    "lm_head": {"bits": 4, "group_size": 16, "act_bits": 16, "super_bits": None},
}


def test_a_layer_may_have_bits_and_zero_points_of_its_own(tmp_path: Path) -> None:
    def make(module: str, weight: Array) -> Matrix:
        bits = 8 if module.endswith("down_proj") else 4
        return gptq(bits, symmetric=module != "model.layers.0.self_attn.q_proj")(module, weight)

    format_ = Format({**CONFIG, "extra_config": EXTRA}, make)
    weights = assert_logits(write_checkpoint(tmp_path, LLAMA, format_, ignored=("layers.1.mlp.down_proj",), head=True))
    assert len(coded(weights["layers"][1])) == 3  # down_proj is in float
    assert {one.bits for one in coded(weights["layers"][0]["feed_forward"])} == {4, 8}
    assert len(coded(weights["layers"][0]["attention"]["qkv"])) == 3  # q apart from k and v
    assert len(coded(weights["head"])) == 1


def test_the_name_of_a_layer_goes_before_a_pattern_and_that_before_the_blocks() -> None:
    found = read(extra_config=EXTRA, block_name_to_quantize="model.layers.0,model.layers.1")
    assert found.format_of("model.layers.0.mlp.down_proj") == GPTQ(8, 16, True, True)
    assert found.format_of("model.layers.1.mlp.down_proj") is None
    assert found.format_of("model.layers.1.mlp.up_proj") == GPTQ(4, 16, True, True)
    assert found.format_of("model.layers.2.mlp.up_proj") is None
    assert found.format_of("lm_head") == GPTQ(4, 16, True, True)
    assert found.format_of("model.layers.0.mlp.down_projection") == GPTQ(4, 16, True, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_name_to_quantize": ["model.layers"]},
        {"block_name_to_quantize": [["model.layers.0", "model.layers.1"]]},
        {"block_name_to_quantize": None, "to_quant_block_names": "model.layers"},
        {"block_name_to_quantize": "model.vision", "quant_block_list": [["model.layers.0"], ["model.layers.1"]]},
    ],
)
def test_blocks_are_named_in_several_ways(fields: dict[str, Any]) -> None:
    found = read(**fields)
    assert found.format_of("model.layers.1.mlp.up_proj") is not None
    assert found.format_of("lm_head") is None


def test_all_modules_are_quantised_where_no_block_is_named() -> None:
    assert read(block_name_to_quantize=None).format_of("lm_head") is not None


@pytest.mark.parametrize("packing", PACKINGS)
def test_each_packing_is_that_of_gptq_or_awq(packing: str) -> None:
    expected: Any = {"auto_gptq": GPTQ(4, 16, True, True), "gptqmodel": GPTQ(4, 16, True, False), "auto_awq": AWQ(16)}
    for text in (packing, f"auto_round:{packing}"):
        assert read(packing_format=text).default == expected[PACKINGS[packing]]
    assert read(packing_format=None, quant_method="intel/auto-round").default == expected["auto_gptq"]


def test_a_module_outside_the_blocks_must_not_be_quantised(tmp_path: Path) -> None:
    config = {**CONFIG, "block_name_to_quantize": "model.layers.0"}
    write_checkpoint(tmp_path, LLAMA, Format(config, FORMATS["auto-round"].make))
    source = open_checkpoint(locate(str(tmp_path)))
    assert source is not None
    with pytest.raises(InvalidCheckpoint, match=r"extra: model\.layers\.1\.mlp\.down_proj\.g_idx"):
        load_weights(build_model(LLAMA), source, dtype="float32")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format = 'auto_round:llm_compressor' is not supp"),
        ({"packing_format": "auto_round:fp8_static"}, "packing_format = 'auto_round:fp8_static'"),
        ({"packing_format": "mlx"}, "packing_format = 'mlx'"),
        ({"packing_format": None, "backend": "auto_round:exllamav2"}, "backend = 'auto_round:exllamav2'"),
        ({"bits": 3}, "bits = 3 is not supported: known are 4, 8, and 16 for floats"),
        ({"bits": 8, "packing_format": "auto_round:auto_awq"}, "bits = 8 is not supported: known are 4, and 16"),
        ({"bits": None}, "bits is missing"),
        ({"group_size": "all"}, "group_size = 'all'"),
        ({"sym": "yes"}, "sym = 'yes'"),
        ({"data_type": "mx_fp"}, "data_type = 'mx_fp'"),
        ({"act_bits": 8}, "act_bits = 8 is not supported: the weights alone"),
        ({"act_bits": True}, "act_bits = True"),
        ({"super_bits": 6}, "super_bits = 6"),
        ({"rotation_config": {"a": 1}}, "rotation_config = {'a': 1}"),
        ({"spinquant_config": {"r1": True}}, "spinquant_config = {'r1': True}"),
        ({"static_kv_dtype": "fp8"}, "static_kv_dtype = 'fp8'"),
        ({"block_name_to_quantize": []}, "block_name_to_quantize = []: names of blocks are needed"),
        ({"block_name_to_quantize": {"a": 1}}, "block_name_to_quantize = {'a': 1}"),
        ({"block_name_to_quantize": "model.layers,,"}, "block_name_to_quantize = 'model.layers,,'"),
        ({"extra_config": [1]}, "extra_config = [1]: an object is needed"),
        ({"extra_config": {"a.b": {"bits": 2}}}, "extra_config.a.b.bits = 2"),
        ({"extra_config": {"a.b": 8}}, "extra_config.a.b = 8"),
        ({"extra_config": {"a.b": {"act_bits": 4}}}, "extra_config.a.b.act_bits = 4"),
        ({"extra_config": {"a.b": {"data_type": "nv_fp"}}}, "extra_config.a.b.data_type = 'nv_fp'"),
        ({"extra_config": {"(a+)+": {"bits": 8}}}, "extra_config = "),
        ({"extra_config": {"(": {"bits": 8}}}, "'(' is no pattern"),
    ],
)
def test_what_is_not_supported_is_refused_by_field_and_value(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(QuireError) as refusal:
        read(**fields)
    assert named in str(refusal.value)
