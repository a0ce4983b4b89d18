"""Quantised checkpoints that do not fit, and schemes that are not supported, are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.errors import InvalidCheckpoint, QuireError, UnsupportedModel
from quire.files.model_files import locate
from quire.files.safetensors_source import SafetensorsSource
from quire.models.checkpoint import load_weights
from quire.models.formats.quantized_source import READERS, open_checkpoint, read_quantization
from quire.models.formats.refused_methods import REASONS
from quire.models.registry import build_model
from tests.models.cases import CASES
from tests.models.quantized_checkpoints import FORMATS, write_checkpoint
from tests.models.tiny import NamedTensors

LLAMA = CASES["llama"]
AT = "model.layers.1.self_attn.k_proj"
Arrays = dict[str, np.ndarray[Any, Any]]


def load(folder: Path) -> None:
    files = locate(str(folder))
    source = open_checkpoint(files)
    assert source is not None
    load_weights(build_model(files.config), source, dtype="float32")


def without(suffix: str) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.pop(f"{AT}.{suffix}")


def with_(suffix: str, change: Callable[[Any], Any]) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({f"{AT}.{suffix}": np.ascontiguousarray(change(arrays[f"{AT}.{suffix}"]))})


def place(array: Any, value: Any) -> Any:
    array = array.copy()
    array.reshape(-1)[3] = value
    return array


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("gptq-4", without("scales"), "scales is missing"),
        ("gptq-4", without("qzeros"), "qzeros is missing"),
        ("gptq-4", with_("scales", lambda a: a[:1]), "scales is [1, 16]; by its quantisation it is [2, 16]"),
        ("gptq-4", with_("scales", lambda a: place(a, np.inf)), "scales has numbers that are not finite"),
        ("gptq-4", with_("qzeros", lambda a: a.astype(np.int64)), "qzeros is int64"),
        ("gptq-4", with_("qzeros", lambda a: place(a, 0)), "qzeros has zero points other than 8"),
        ("gptq-4", with_("qweight", lambda a: a[0]), "qweight is [16]; a matrix is needed"),
        ("gptq-4", with_("qweight", lambda a: a[:, :15]), "scales is [2, 16]"),
        ("fbgemm-fp8", without("weight_scale"), "weight_scale is missing"),
        ("fbgemm-fp8", with_("weight_scale", lambda a: a[:1]), "weight_scale is [1, 1]; by its quantisation"),
        ("fbgemm-fp8", with_("weight_scale", lambda a: place(a, np.nan)), "weight_scale has numbers"),
        ("modelopt-fp8", without("input_scale"), "input_scale is missing"),
        ("modelopt-fp8", without("weight_scale"), "weight_scale is missing"),
        ("modelopt-fp8", with_("input_scale", lambda a: 0 * a), "input_scale is 0; activations are divided by it"),
        ("modelopt-fp8-channels", with_("weight_scale", lambda a: a[:-1]), "weight_scale is [15, 1]"),
        (
            "modelopt-fp8-channels",
            lambda arrays: arrays.update({f"{AT}.input_scale": np.ones(1, np.float32)}),
            "input_scale is not used: by its config no activation is divided by it",
        ),
        ("modelopt-fp8-blocks", with_("weight_scale", lambda a: a[:, :1]), "weight_scale is [1, 1]"),
        ("gptq-4-act-order", without("g_idx"), "g_idx is missing"),
        ("gptq-4-act-order", with_("g_idx", lambda a: place(a, 2)), "g_idx names group 2; there are 2"),
        ("gptq-4-act-order", with_("g_idx", lambda a: place(a, -1)), "g_idx names group -1; there are 2"),
        ("gptq-4-act-order", with_("g_idx", lambda a: a[:-1]), "g_idx is [31]"),
        ("gptq-8", with_("bias", lambda a: a + 1), "1 extra: model.layers.1.self_attn.k_proj.bias"),
        ("awq", with_("qzeros", lambda a: a[:, :1]), "qzeros is [2, 1]"),
        ("awq", with_("qweight", lambda a: a[:24]), "qweight has 24 inputs"),
        ("awq", with_("qweight", lambda a: a[:0]), "qweight is [0, 2]; a matrix is needed"),
        ("fp8-blocks", without("weight_scale_inv"), "weight_scale_inv is missing"),
        ("fp8-blocks", with_("weight_scale_inv", lambda a: a[:, :1]), "weight_scale_inv is [2, 1]"),
        ("fp8-static", without("input_scale"), "input_scale is missing"),
        ("fp8-static", with_("input_scale", lambda a: -a), "input_scale is -0.03"),
        ("fp8-static", with_("weight", lambda a: a.astype(np.int8)), "weight is int8"),
        ("fp8-static", with_("weight_scale", lambda a: a.repeat(3)), "weight_scale is [3]"),
        ("ct-int4", without("weight_shape"), "weight_shape is missing"),
        ("ct-int4", with_("weight_shape", lambda a: a + 1), "weight_shape is [17, 33]"),
        ("ct-int4", with_("weight_shape", lambda a: -a), "weight_shape is [-16, -32]"),
        ("ct-int4", with_("weight_packed", lambda a: a[:, :3]), "weight_packed is [16, 3]"),
        ("ct-int4-asymmetric", without("weight_zero_point"), "weight_zero_point is missing"),
        ("ct-int8", without("weight_scale"), "weight_scale is missing"),
        ("ct-int8-static", with_("input_scale", lambda a: a * np.nan), "input_scale has numbers that are not finite"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(
    name: str, change: Callable[[Arrays], object], named: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, LLAMA, FORMATS[name])
    source = SafetensorsSource(tmp_path)
    arrays = {tensor: np.array(source.read(tensor)) for tensor in source.tensors()}
    change(arrays)
    save_file(arrays, checkpoint.folder / "model.safetensors")
    with pytest.raises(InvalidCheckpoint) as refusal:
        load(tmp_path)
    assert f"{AT}.{named}" in str(refusal.value) or (AT in named and named in str(refusal.value))


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA, FORMATS["ct-int4"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(InvalidCheckpoint, match=r"down_proj\.weight is \[32, 48\], the config says \[32, 64\]"):
        load(tmp_path)


def test_a_module_that_is_ignored_must_not_be_quantised(tmp_path: Path) -> None:
    format_ = FORMATS["ct-int4"]
    config = {**format_.config, "ignore": ["lm_head", AT]}
    write_checkpoint(tmp_path, LLAMA, format_._replace(config=config))
    with pytest.raises(InvalidCheckpoint, match=rf"missing: {AT}\.weight .*extra: .*{AT}\.weight_packed"):
        load(tmp_path)


def group(**changes: Any) -> dict[str, Any]:
    """A config of int4 with one changed field, whose name may have dots."""
    config = json.loads(json.dumps(FORMATS["ct-int4"].config))
    for name, value in changes.items():
        *path, last = name.split("__")
        fields = config
        for part in path:
            fields = fields[part]
        fields[last] = value
    return config


GROUP_0 = "config_groups__group_0"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method = 'bitsandbytes' is not supported: its"),
        ({"quant_method": "mxfp4"}, "quant_method = 'mxfp4' is not supported: of the families here, gpt_oss alone"),
        ({"quant_method": "quip"}, "quant_method = 'quip' is not supported: known are compressed-tensors, fp8"),
        ({"bits": 4}, "quant_method = None"),
        ({"quant_method": ["gptq"]}, "quant_method = ['gptq']"),
        ({**FORMATS["gptq-4"].config, "bits": 3}, "bits = 3 is not supported: known are 4 and 8"),
        ({**FORMATS["gptq-4"].config, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({**FORMATS["gptq-4"].config, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic = "),
        ({**FORMATS["gptq-4"].config, "group_size": "all"}, "group_size = 'all'"),
        ({**FORMATS["awq"].config, "version": "gemv"}, "version = 'gemv' is not supported: known is gemm"),
        ({**FORMATS["awq"].config, "zero_point": False}, "zero_point = False"),
        ({**FORMATS["awq"].config, "bits": 8}, "bits = 8"),
        ({**FORMATS["fp8-blocks"].config, "scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0'"),
        ({**FORMATS["fp8-blocks"].config, "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({**FORMATS["fp8-blocks"].config, "activation_scheme": "static"}, "activation_scheme = 'static'"),
        ({**FORMATS["fp8-blocks"].config, "weight_block_size": [0, 128]}, "weight_block_size = [0, 128]"),
        ({**FORMATS["fbgemm-fp8"].config, "activation_scale_ub": 0}, "activation_scale_ub = 0: a number above 0"),
        ({**FORMATS["fbgemm-fp8"].config, "activation_scale_ub": "1200"}, "activation_scale_ub = '1200'"),
        ({**FORMATS["fbgemm-fp8"].config, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
        ({**FORMATS["fp8-static"].config, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = "),
        (group(format="mxfp8-quantized"), "format = 'mxfp8-quantized' is not supported: known are float"),
        (group(kv_cache_scheme={"num_bits": 4}), "kv_cache_scheme.num_bits = 4"),
        (group(kv_cache_scheme={"num_bits": 8, "symmetric": False}), "kv_cache_scheme.symmetric = False"),
        (group(kv_cache_scheme={"strategy": "channel"}), "kv_cache_scheme.strategy = 'channel'"),
        (group(kv_cache_scheme={"group_size": 64}), "kv_cache_scheme.group_size = 64"),
        (group(kv_cache_scheme={"rotated": True}), "kv_cache_scheme.rotated = True"),
        (group(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format = 'sparse-24-bitmask'"),
        (group(transform_config={"config_groups": {"u": {}}}), "transform_config = "),
        (group(moe_sparsity_config={"a": 1}), "moe_sparsity_config = "),
        (group(something_new=3), "something_new = 3"),
        (group(config_groups={}), "config_groups = {}"),
        (group(**{f"{GROUP_0}__weights__num_bits": 2}), "config_groups.group_0.weights.num_bits = 2"),
        (group(**{f"{GROUP_0}__weights__type": "float"}), "weights.type = 'float'"),
        (group(**{f"{GROUP_0}__weights__strategy": "attn_head"}), "weights.strategy = 'attn_head'"),
        (group(**{f"{GROUP_0}__weights__dynamic": True}), "weights.dynamic = True"),
        (group(**{f"{GROUP_0}__weights__pattern": 1}), "weights.pattern = 1"),
        (group(**{f"{GROUP_0}__output_activations": {"num_bits": 8}}), "output_activations = "),
        (group(**{f"{GROUP_0}__input_activations": {"num_bits": 4}}), "input_activations.num_bits = 4"),
        (
            group(**{f"{GROUP_0}__input_activations": {"num_bits": 8, "strategy": "token"}}),
            "input_activations.strategy = 'token'",
        ),
        (group(**{f"{GROUP_0}__targets": ["re:(a+)+$"]}), "targets = "),
        (group(ignore=["re:("]), "ignore: '(' is no pattern"),
        (group(ignore=["re:" + ".*" * 200]), "is beyond what a pattern may have"),
        (group(ignore=["re:" + "a" * 600]), "is beyond what a pattern may have"),
        (group(ignore="lm_head"), "ignore = 'lm_head'"),
        (group(config_groups=[1]), "config_groups = [1]"),
        ({**FORMATS["fp8-blocks"].config, "weight_block_size": [True, True]}, "weight_block_size = [True, True]"),
    ],
)
def test_what_is_not_supported_is_refused_by_field_and_value(config: dict[str, Any], named: str) -> None:
    with pytest.raises(QuireError) as refusal:
        read_quantization({**LLAMA, "quantization_config": config})
    assert named in str(refusal.value)


@pytest.mark.parametrize("method", REASONS)
def test_a_method_that_is_not_read_is_refused_with_what_to_use_instead(method: str) -> None:
    assert method not in READERS
    with pytest.raises(UnsupportedModel, match=f"'{method}' is not supported: [^;]+; use [a-z ]+") as refusal:
        read_quantization({**LLAMA, "quantization_config": {"quant_method": method, "bits": 4}})
    assert str(refusal.value).endswith(REASONS[method])


def test_matrices_that_are_stored_transposed_are_refused(tmp_path: Path) -> None:
    config = CASES["gpt2"]
    write_checkpoint(tmp_path, config, FORMATS["gptq-4"])
    with pytest.raises(UnsupportedModel, match=r"attn\.c_proj\.weight is quantised: this family stores its matrices"):
        load(tmp_path)


def test_random_weights_are_not_quantised(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA, FORMATS["awq"])
    with pytest.raises(UnsupportedModel, match="quantization_config is for safetensors files"):
        open_checkpoint(locate(f"random:{tmp_path}"))


def test_a_plain_checkpoint_is_no_quantised_one(tmp_path: Path) -> None:
    source = NamedTensors(build_model(LLAMA))
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": FORMATS["gptq-4"].config}))
    save_file({name: source.read(name) for name in source.tensors()}, tmp_path / "model.safetensors")
    load(tmp_path)  # every module is as it would be if the config named it as one that is left alone
