"""Writes tiny checkpoints in each quantised format, and knows what they stand for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from quire.models.checkpoint import leaves
from quire.models.registry import build_model
from tests.models.four_bit_matrices import by_power, mxfp4, nvfp4
from tests.models.quantized_matrices import (
    BLOCK,
    GROUP,
    Array,
    Make,
    Round,
    awq,
    by_bounded_token,
    by_run,
    by_stored,
    by_token,
    float8_blocks,
    float8_rows,
    gptq,
    int8_rows,
    packed,
)
from tests.models.tiny import named_tensor


class Format(NamedTuple):
    config: dict[str, Any]
    make: Make


class Checkpoint(NamedTuple):
    folder: Path
    config: dict[str, Any]
    wide: dict[str, Array]  # every tensor of the model, in float32
    rounds: dict[str, Round]  # by the name of a weight


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    format_: Format,
    *,
    ignored: tuple[str, ...] = (),
    make: Make | None = None,
    head: bool = False,
    others: Mapping[str, Array] | None = None,
) -> Checkpoint:
    """Quantise every matrix of the layers but routers and those whose names contain one of `ignored`; the `head` if
    asked to. `others` are stored too."""
    model = build_model(config)
    stored: dict[str, Array] = dict(others or {})
    wide: dict[str, Array] = {}
    rounds: dict[str, Round] = {}
    matrices = {
        tensor.name for param in leaves(model.params()["layers"]) if param.is_matrix for tensor in param.sources
    }
    matrices |= {"lm_head.weight"} if head else set()
    for param in leaves(model.params()):
        for tensor in param.sources:
            weight = named_tensor(tensor.name, tensor.shape)
            is_left = any(part in tensor.name for part in (*ignored, "router", "mlp.gate.", "block_sparse_moe.gate."))
            if tensor.name not in matrices or is_left:
                stored[tensor.name] = wide[tensor.name] = weight
                continue
            module = tensor.name.removesuffix(".weight")
            made = (make or format_.make)(module, weight)
            stored |= {f"{module}.{suffix}": array for suffix, array in made.tensors.items()}
            wide[tensor.name], rounds[tensor.name] = made.wide, made.round
    full = {**config, "quantization_config": format_.config}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(full))
    save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, folder / "model.safetensors")
    return Checkpoint(folder, full, wide, rounds)


def write_plain(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Path:
    """The same model with its matrices in float32."""
    folder.mkdir(exist_ok=True)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(plain))
    save_file(
        {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def compressed(
    stored: str, weights: dict[str, Any], activations: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    of_weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "group_size": None,
        "dynamic": False,
        "actorder": None,
    }
    group = {
        "targets": ["Linear"],
        "weights": {**of_weights, "observer": "minmax", "observer_kwargs": {}, "block_structure": None, **weights},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.2,
        "version": "0.10.2",
        "sparsity_config": {},
        "transform_config": {},
        **others,
    }


def _gptq_config(bits: int, **fields: Any) -> dict[str, Any]:
    defaults = {"damp_percent": 0.1, "static_groups": False, "true_sequential": True, "desc_act": False, "sym": True}
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **defaults, **fields}


def _auto_round(packing: str, **fields: Any) -> dict[str, Any]:
    defaults = {"bits": 4, "group_size": GROUP, "sym": True, "data_type": "int", "autoround_version": "0.16.1"}
    blocks = {"block_name_to_quantize": "model.layers"}
    return {"quant_method": "auto-round", "packing_format": packing, **defaults, **blocks, **fields}


def _modelopt(algorithm: str, **fields: Any) -> dict[str, Any]:
    producer = {"name": "modelopt", "version": "0.47.0"}
    return {"quant_method": "modelopt", "producer": producer, "quant_algo": algorithm, "ignore": ["lm_head"], **fields}


REACH = 1.5  # which some activations exceed
_FP8 = {"num_bits": 8, "type": "float"}
F8 = "torch.float8_e4m3fn"
_TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": F8}
_MX4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_INT4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
_ZERO = {"input_scale": np.full(1, 0.05, np.float32), "input_zero_point": np.full(1, -7, np.int8)}

FORMATS: dict[str, Format] = {
    "gptq-4": Format(_gptq_config(4, checkpoint_format="gptq"), gptq(4)),
    "gptq-4-act-order": Format(_gptq_config(4, desc_act=True), gptq(4, act_order=True)),
    "gptq-4-asymmetric": Format(_gptq_config(4, sym=False), gptq(4, symmetric=False)),
    "gptq-4-v2": Format(_gptq_config(4, sym=False, checkpoint_format="gptq_v2"), gptq(4, symmetric=False, version=2)),
    "gptq-8": Format(_gptq_config(8), gptq(8)),
    "gptq-8-act-order-v2": Format(
        _gptq_config(8, sym=False, desc_act=True, checkpoint_format="gptq_v2"),
        gptq(8, symmetric=False, version=2, act_order=True),
    ),
    "awq": Format(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        awq,
    ),
    "fp8-blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
        lambda module, weight: float8_blocks(weight, BLOCK, "weight_scale_inv", by_run(BLOCK[1])),
    ),
    "fp8-dynamic": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, float8_rows("tensor", "weight_scale", None)
    ),
    "fp8-static": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        float8_rows("tensor", "weight_scale", "input_scale"),
    ),
    "fp8-static-newer-names": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False},
        float8_rows("tensor", "weight_scale_inv", "activation_scale"),
    ),
    "ct-fp8-static": Format(
        compressed("float-quantized", {**_FP8, "strategy": "tensor"}, {**_FP8, "strategy": "tensor", "dynamic": False}),
        float8_rows("tensor", "weight_scale", "input_scale", ml_dtypes.bfloat16),
    ),
    "ct-fp8-dynamic": Format(
        compressed("float-quantized", {**_FP8, "strategy": "channel"}, {**_TOKEN, "type": "float"}),
        float8_rows("channel", "weight_scale", None, ml_dtypes.bfloat16),
    ),
    "ct-fp8-blocks": Format(
        compressed(
            "float-quantized",
            {**_FP8, "strategy": "block", "block_structure": list(BLOCK)},
            {**_FP8, "strategy": "group", "group_size": BLOCK[1], "dynamic": True},
        ),
        lambda module, weight: float8_blocks(weight, BLOCK, "weight_scale", by_run(BLOCK[1])),
    ),
    "ct-int8": Format(
        compressed("int-quantized", {"strategy": "channel"}, {**_TOKEN, "type": "int"}), int8_rows(by_token(False), {})
    ),
    "ct-int8-asymmetric": Format(
        compressed("int-quantized", {"strategy": "channel"}, {**_TOKEN, "type": "int", "symmetric": False}),
        int8_rows(by_token(False, False), {}),
    ),
    "ct-int8-static": Format(
        compressed(
            "int-quantized",
            {"strategy": "channel"},
            {"num_bits": 8, "type": "int", "symmetric": False, "dynamic": False},
        ),
        int8_rows(by_stored(0.05, False, -7), _ZERO),
    ),
    "auto-round": Format(_auto_round("auto_round:auto_gptq"), gptq(4)),
    "auto-round-awq": Format(_auto_round("auto_round:auto_awq", sym=False), awq),
    "fbgemm-fp8": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": REACH, "modules_to_not_convert": ["lm_head"]},
        float8_rows("channel", "weight_scale", None, round_=by_bounded_token(REACH)),
    ),
    "modelopt-fp8": Format(
        _modelopt("FP8", kv_cache_scheme=None), float8_rows("tensor", "weight_scale", "input_scale")
    ),
    "modelopt-fp8-channels": Format(
        _modelopt("FP8_PER_CHANNEL_PER_TOKEN"), float8_rows("channel", "weight_scale", None)
    ),
    "modelopt-fp8-blocks": Format(
        _modelopt("fp8_pb_wo", group_size=GROUP),
        lambda module, weight: float8_blocks(weight, (GROUP, GROUP), "weight_scale", lambda x: x),
    ),
    "ct-int4": Format(compressed("pack-quantized", _INT4), packed(4)),
    "ct-int4-asymmetric": Format(
        compressed("pack-quantized", {**_INT4, "symmetric": False}), packed(4, symmetric=False)
    ),
    "ct-int4-act-order": Format(
        compressed("pack-quantized", {**_INT4, "actorder": "group"}), packed(4, act_order=True)
    ),
    "ct-int8-packed": Format(
        compressed("pack-quantized", {"strategy": "channel", "symmetric": False}), packed(8, size=None, symmetric=False)
    ),
    "ct-nvfp4": Format(compressed("nvfp4-pack-quantized", _FP4, {**_FP4, "dynamic": "local"}), nvfp4(rounds=True)),
    "ct-nvfp4-weights": Format(compressed("nvfp4-pack-quantized", _FP4), nvfp4(rounds=False)),
    "modelopt-nvfp4": Format(_modelopt("NVFP4", group_size=16), nvfp4(rounds=True, is_modelopt=True)),
    "modelopt-nvfp4-weights": Format(_modelopt("W4A16_NVFP4"), nvfp4(rounds=False, is_modelopt=True)),
}

# In groups of 32 inputs, which not every tiny model has.
WIDE_FORMATS: dict[str, Format] = {
    "ct-mxfp4": Format(compressed("mxfp4-pack-quantized", _MX4, {**_MX4, "dynamic": True}), mxfp4(by_power)),
    "ct-mxfp4-weights": Format(compressed("mxfp4-pack-quantized", _MX4), mxfp4(None)),
    "ct-mxfp4-int8": Format(
        compressed("mxfp4-pack-quantized", _MX4, {**_TOKEN, "type": "int"}), mxfp4(by_token(False))
    ),
}
