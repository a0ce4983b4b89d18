"""Writes checkpoints that ModelOpt quantised, and the logits that it computes of them.

    python -m tests.golden.make_modelopt [CASE ...]

Ran once with nvidia-modelopt 0.47.0, transformers 5.23.0 and torch 2.13.0 on a CPU. It is no dependency of the tests:
they read the files.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.make import reference_model
from tests.golden.make_quantized import CONFIG, FOLDER, LENGTH
from tests.models.tiny import prompt

BLOCKS_CONFIG = {**CONFIG, "hidden_size": 128, "intermediate_size": 256}  # blocks are 128 x 128
# The name of a config of ModelOpt, and what is kept in float besides the head.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "modelopt-fp8": ("FP8_DEFAULT_CFG", ()),
    "modelopt-fp8-and-cache": ("FP8_DEFAULT_CFG", ("*self_attn.o_proj*",)),
    "modelopt-fp8-channels": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", ()),
    "modelopt-fp8-blocks": ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", ()),
    "modelopt-nvfp4": ("NVFP4_DEFAULT_CFG", ()),
    "modelopt-nvfp4-weights": ("W4A16_NVFP4_CFG", ("*mlp.down_proj*",)),
}


def quantised(name: str, folder: Path) -> Any:
    """The model, whose products are rounded as the files say."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    kind, ignored = CASES[name]
    model = reference_model(BLOCKS_CONFIG if name.endswith("blocks") else CONFIG, folder)
    texts = [torch.tensor([prompt(64, CONFIG["vocab_size"], seed)]) for seed in range(8)]
    config = getattr(mtq, kind)
    if name.endswith("cache"):
        config = mtq.utils.update_quant_cfg_with_kv_cache_quant(config, mtq.FP8_KV_CFG["quant_cfg"])
    model = mtq.quantize(model, config, lambda one: [one(ids) for ids in texts])
    for wildcard in ignored:
        mtq.disable_quantizer(model, wildcard)
    requantize_resmooth_fused_llm_layers(model)  # as the export does: parts of a fused projection get one scale
    return model


def as_nvfp4(model: Any) -> Any:
    """The model with what ModelOpt's own functions make of weights and inputs: its kernels for that are for GPUs."""
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def near(x: Any, over: Any) -> Any:
        found, scale, double_scale = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=over)
        return found.dequantize(x.dtype, scale=scale, double_scale=double_scale, block_sizes={-1: 16})

    model = copy.deepcopy(model)
    for module in model.modules():
        if not getattr(getattr(module, "weight_quantizer", None), "is_enabled", False):
            continue
        over = NVFP4QTensor.get_weights_scaling_factor_2_from_quantizer(module.weight_quantizer)
        module.weight.data = near(module.weight.data, over)
        if module.input_quantizer.is_enabled:
            reach = NVFP4QTensor.get_activation_scaling_factor(module.input_quantizer)
            module.register_forward_pre_hook(lambda _, given, reach=reach: (near(given[0], reach), *given[1:]))
    mtq.disable_quantizer(model, "*")
    return model


def logits(model: Any) -> np.ndarray[Any, Any]:
    """With a cache in float."""
    import modelopt.torch.quantization as mtq
    import torch

    state = {name: one for name, one in model.named_modules() if name.endswith("_bmm_quantizer") and one.is_enabled}
    mtq.disable_quantizer(model, "*_bmm_quantizer")
    with torch.no_grad():
        found = model(torch.tensor([prompt(LENGTH, CONFIG["vocab_size"])])).logits[0].numpy()
    for one in state.values():
        one.enable()
    return found  # type: ignore[no-any-return]


def make(name: str) -> None:
    import modelopt
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        model, made = quantised(name, Path(folder) / "plain"), Path(folder) / "made"
        rounded = as_nvfp4(model) if "nvfp4" in name else model
        expected = {
            "made_by": f"nvidia-modelopt {modelopt.__version__}, torch {torch.__version__}",
            "tokens": prompt(LENGTH, CONFIG["vocab_size"]),
            "logits": [[float(f"{x:.7g}") for x in row] for row in logits(rounded).tolist()],
        }
        export_hf_checkpoint(model, export_dir=made)
        target = FOLDER / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for file in ("config.json", "hf_quant_config.json", "model.safetensors"):
            shutil.copy(made / file, target / file)
        (target / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
