"""Checkpoints of four-bit floats: what they take in memory, their experts and parts, and files that do not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.errors import InvalidCheckpoint, QuireError
from quire.files.model_files import locate
from quire.files.safetensors_source import SafetensorsSource
from quire.models.checkpoint import load_weights, weights_like
from quire.models.formats.quantized_source import QuantizedSource, open_checkpoint, read_quantization
from quire.models.registry import build_model
from quire.ops.weights.parts import Parts
from tests.models.cases import CASES
from tests.models.four_bit_matrices import OVER, by_local
from tests.models.quantized_checkpoints import FORMATS, WIDE_FORMATS, Format, write_checkpoint, write_plain
from tests.models.quantized_matrices import Array, Matrix
from tests.models.test_quantized import on_first_device
from tests.models.test_quantized_checkpoints import LLAMA, TOKENS, assert_logits, coded, loaded
from tests.models.tiny import relative_error, whole_logits

WIDE = {**LLAMA, "intermediate_size": 64}
ALL = {name: one for name, one in FORMATS.items() if "nvfp4" in name} | WIDE_FORMATS
AT = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize("name", WIDE_FORMATS)
def test_logits_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    weights = assert_logits(write_checkpoint(tmp_path, WIDE, WIDE_FORMATS[name]))
    assert len(coded(weights)) == 4 * LLAMA["num_hidden_layers"]  # qkv, out, gate and up, down


@pytest.mark.parametrize("name", ALL)
def test_weights_keep_their_four_bits_and_their_sizes_are_known_before(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, WIDE, ALL[name])
    files = locate(str(tmp_path))
    model, source = build_model(files.config), open_checkpoint(files)
    assert isinstance(source, QuantizedSource)
    weights = load_weights(model, source, dtype="float32", placement=on_first_device)
    like = weights_like(model, source, dtype="float32")
    same = jax.tree.map(lambda one, array: (one.shape, one.dtype) == (array.shape, array.dtype), like, weights)
    assert jax.tree.all(same)
    for weight in coded(weights):
        bits = 8 * sum(array.nbytes for array in (weight.codes, weight.scales)) / np.prod(weight.shape)
        assert bits == (4.5 if weight.group == 16 else 4.25)
        assert (weight.output_scales is not None) == (weight.group == 16)


@pytest.mark.parametrize("name", ["ct-nvfp4-weights", "modelopt-nvfp4-weights", "ct-mxfp4-weights"])
@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "llama-biases"])
def test_experts_and_biases_may_be_beside_them(case: str, name: str, tmp_path: Path) -> None:
    config = {**CASES[case], "head_dim": 8, "moe_intermediate_size": 32, "intermediate_size": 64}
    checkpoint = write_checkpoint(tmp_path / "coded", config, ALL[name])
    write_plain(tmp_path / "plain", config, checkpoint.wide)
    got, expected = (whole_logits(*loaded(folder), TOKENS) for folder in (checkpoint.folder, tmp_path / "plain"))
    assert relative_error(got, expected) < 1e-5


def test_parts_of_a_fused_projection_have_scales_of_their_own_and_one_product(tmp_path: Path) -> None:
    weights = assert_logits(write_checkpoint(tmp_path / "a", LLAMA, FORMATS["ct-nvfp4"]))
    qkv = weights["layers"][0]["attention"]["qkv"]
    assert len(np.unique(qkv.output_scales)) == 3  # of q, k and v

    def by_scale(module: str, weight: Array) -> Matrix:
        made = FORMATS["ct-nvfp4"].make(module, weight)
        over = OVER * np.float32(0.5) if module.endswith("k_proj") else OVER
        return Matrix({**made.tensors, "input_global_scale": over.reshape(1)}, made.wide, by_local(over))

    weights = assert_logits(write_checkpoint(tmp_path / "b", LLAMA, FORMATS["ct-nvfp4"], make=by_scale))
    assert isinstance(weights["layers"][0]["attention"]["qkv"], Parts)


def test_a_head_can_be_so_too(tmp_path: Path) -> None:
    config = {**FORMATS["modelopt-nvfp4"].config, "ignore": []}
    weights = assert_logits(
        write_checkpoint(tmp_path, LLAMA, Format(config, FORMATS["modelopt-nvfp4"].make), head=True)
    )
    assert len(coded(weights["head"])) == 1


@pytest.mark.parametrize(
    ("name", "most"),
    [("ct-mxfp4-weights", 1e-5), ("ct-nvfp4-weights", 0.15)],  # half of the largest is half between two codes of int8
)
def test_int8_rounds_their_numbers_again(name: str, most: float, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "coded", WIDE, ALL[name])
    got = whole_logits(*loaded(checkpoint.folder, quantize="int8"), TOKENS)
    write_plain(tmp_path / "plain", WIDE, checkpoint.wide)
    expected = whole_logits(*loaded(tmp_path / "plain", quantize="int8"), TOKENS)
    assert relative_error(got, expected) < most


def changed(suffix: str, change: Callable[[Any], Any] | None) -> Callable[[dict[str, Any]], None]:
    def apply(arrays: dict[str, Any]) -> None:
        array = arrays.pop(f"{AT}.{suffix}", np.float32([2.0]))
        if change is not None:
            arrays[f"{AT}.{suffix}"] = np.ascontiguousarray(change(array))

    return apply


def place(value: Any) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array = array.copy()
        array.reshape(-1)[0] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "suffix", "change", "problem"),
    [
        ("ct-nvfp4", "weight_packed", None, "weight_packed is missing"),
        ("ct-nvfp4", "weight_packed", lambda a: a.astype(np.int8), "weight_packed is int8"),
        ("ct-nvfp4", "weight_packed", lambda a: a[:, :15], "weight_packed has 30 inputs, which groups of 16"),
        ("ct-nvfp4", "weight_packed", lambda a: a[0], "weight_packed is [16]; a matrix is needed"),
        ("ct-nvfp4", "weight_scale", None, "weight_scale is missing"),
        ("ct-nvfp4", "weight_scale", lambda a: a[:, :1], "weight_scale is [16, 1]; by its quantisation it is [16, 2]"),
        ("ct-nvfp4", "weight_scale", lambda a: a.astype(np.float32), "weight_scale is float32"),
        ("ct-nvfp4", "weight_scale", place(np.nan), "weight_scale has numbers that are not finite"),
        ("ct-nvfp4", "weight_global_scale", None, "weight_global_scale is missing"),
        ("ct-nvfp4", "weight_global_scale", lambda a: 0 * a, "weight_global_scale is 0"),
        ("ct-nvfp4", "weight_global_scale", lambda a: a * np.nan, "weight_global_scale has numbers that are not"),
        ("ct-nvfp4", "weight_global_scale", lambda a: a * 0 + 1e-45, "whose inverse is no number"),
        ("ct-nvfp4", "input_global_scale", None, "input_global_scale is missing"),
        ("ct-nvfp4", "input_global_scale", lambda a: -a, "input_global_scale is -300"),
        ("ct-nvfp4-weights", "input_global_scale", lambda a: a, "input_global_scale is not used"),
        ("modelopt-nvfp4", "weight_scale_2", None, "weight_scale_2 is missing"),
        ("modelopt-nvfp4", "input_scale", None, "input_scale is missing"),
        ("modelopt-nvfp4", "input_scale", lambda a: a * 0 + 1e-45, "whose inverse is no number"),
        ("modelopt-nvfp4", "weight", lambda a: a.astype(np.int8), "weight is int8"),
        ("modelopt-nvfp4-weights", "input_scale", lambda a: a, "input_scale is not used"),
        ("ct-mxfp4", "weight_scale", place(255), "weight_scale has exponents of 255, which stand for no number"),
        ("ct-mxfp4", "weight_scale", lambda a: a.astype(np.float32), "weight_scale is float32"),
        ("ct-mxfp4", "weight_global_scale", lambda a: a, "weight_global_scale is not used"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, suffix: str, change: Callable[[Any], Any] | None, problem: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, WIDE, ALL[name])
    file = tmp_path / "model.safetensors"
    source = SafetensorsSource(tmp_path)
    arrays = {name: source.read(name).copy() for name in source.tensors()}
    changed(suffix, change)(arrays)
    save_file(arrays, file)
    with pytest.raises(InvalidCheckpoint) as refusal:
        loaded(tmp_path)
    assert f"{AT}." in str(refusal.value)
    assert problem in str(refusal.value)


def group(name: str, part: str, **changes: Any) -> dict[str, Any]:
    config = ALL[name].config
    one = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"group_0": {**one, part: {**(one[part] or {}), **changes}}}}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (group("ct-nvfp4", "weights", num_bits=8), "weights.num_bits = 8 is not supported: with this format it is 4"),
        (group("ct-nvfp4", "weights", type="int"), "weights.type = 'int'"),
        (group("ct-nvfp4", "weights", group_size=32), "weights.group_size = 32"),
        (group("ct-nvfp4", "weights", strategy="group"), "weights.strategy = 'group'"),
        (group("ct-nvfp4", "weights", symmetric=False), "weights.symmetric = False"),
        (group("ct-nvfp4", "weights", dynamic=True), "weights.dynamic = True"),
        (group("ct-nvfp4", "weights", scale_dtype="torch.uint8"), "weights.scale_dtype = 'torch.uint8'"),
        (group("ct-nvfp4", "weights", actorder="group"), "weights.actorder = 'group'"),
        (group("ct-nvfp4", "weights", pattern=1), "weights.pattern = 1"),
        (group("ct-nvfp4", "input_activations", dynamic=False), "input_activations.dynamic = False"),
        (group("ct-nvfp4", "input_activations", dynamic=True), "input_activations.dynamic = True"),
        (group("ct-nvfp4", "input_activations", type="int"), "input_activations.type = 'int'"),
        (group("ct-nvfp4", "input_activations", group_size=8), "input_activations.group_size = 8"),
        (group("ct-nvfp4", "input_activations", symmetric=False), "input_activations.symmetric = False"),
        (group("ct-nvfp4", "input_activations", num_bits=6), "input_activations.num_bits = 6"),
        (group("ct-mxfp4", "input_activations", dynamic="local"), "input_activations.dynamic = 'local'"),
        (group("ct-mxfp4", "weights", group_size=16), "weights.group_size = 16"),
        (
            group("ct-mxfp4-int8", "input_activations", dynamic=False, strategy="tensor"),
            "input_activations.dynamic = False is not supported: beside weights of four-bit floats it is true",
        ),
        ({**FORMATS["modelopt-nvfp4"].config, "group_size": 32}, "group_size = 32"),
        (
            {**FORMATS["modelopt-nvfp4"].config, "config_groups": {"a": {"weights": {"num_bits": 8}}}},
            "config_groups.a.weights.num_bits = 8",
        ),
        (
            {**FORMATS["modelopt-nvfp4"].config, "config_groups": {"a": {"weights": {"group_size": 32}}}},
            "config_groups.a.weights.group_size = 32",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_field_and_value(config: dict[str, Any], named: str) -> None:
    with pytest.raises(QuireError) as refusal:
        read_quantization({**LLAMA, "quantization_config": config})
    assert named in str(refusal.value)


def test_the_summary_names_the_kinds() -> None:
    found = {name: read_quantization({**LLAMA, "quantization_config": one.config}) for name, one in ALL.items()}
    assert {name: one.summary for name, one in found.items() if one is not None} == {
        "ct-nvfp4": "compressed-tensors, nvfp4 in groups of 16, nvfp4 activations",
        "ct-nvfp4-weights": "compressed-tensors, nvfp4 in groups of 16",
        "modelopt-nvfp4": "modelopt, nvfp4 in groups of 16, nvfp4 activations",
        "modelopt-nvfp4-weights": "modelopt, nvfp4 in groups of 16",
        "ct-mxfp4": "compressed-tensors, mxfp4 in groups of 32, mxfp4 activations",
        "ct-mxfp4-weights": "compressed-tensors, mxfp4 in groups of 32",
        "ct-mxfp4-int8": "compressed-tensors, mxfp4 in groups of 32, dynamic int8 activations",
    }
