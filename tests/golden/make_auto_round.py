"""Writes checkpoints that AutoRound quantised, and the logits that it computes of them.

    python -m tests.golden.make_auto_round [CASE ...]

Ran once with auto-round 0.16.1, transformers 5.23.0 and torch 2.13.0 on a CPU. It is no dependency of the tests: they
read the files.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.make_quantized import AWQ_CONFIG, CONFIG, FOLDER, LENGTH, plain
from tests.models.tiny import prompt

# The format, and arguments of AutoRound.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "auto-round-4": ("auto_round", {}),
    "auto-round-4-asymmetric": ("auto_round:auto_gptq", {"sym": False}),
    "auto-round-4-gptqmodel": ("auto_round:gptqmodel", {"sym": False}),
    "auto-round-8": ("auto_round", {"bits": 8, "group_size": -1}),
    "auto-round-awq": ("auto_round:auto_awq", {"sym": False}),
    "auto-round-awq-symmetric": ("auto_round:auto_awq", {}),
    "auto-round-mixed": (
        "auto_round",
        {
            "layer_config": {
                "down_proj": {"bits": 8, "group_size": 16},
                "model.layers.0.self_attn.o_proj": {"bits": 16},
                "model.layers.0.self_attn.q_proj": {"sym": False},
                "lm_head": {"bits": 4, "group_size": 32, "sym": True, "data_type": "int"},
            }
        },
    ),
}


def quantise(source: Path, folder: Path, name: str) -> Path:
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stored, arguments = CASES[name]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    how = {"bits": 4, "group_size": 32, "sym": True, "iters": 0, "device_map": "cpu", "disable_opt_rtn": True}
    AutoRound(model, tokenizer, **(how | arguments)).quantize_and_save(str(folder), format=stored)
    return next(folder.rglob("config.json")).parent


def matrix(tensors: dict[str, Any], name: str, scheme: Any, packing: str) -> Any:
    """float32 [outputs, inputs] of a module, by AutoRound's own code."""
    import torch
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    words, zeros, scales = (tensors[f"{name}.{suffix}"] for suffix in ("qweight", "qzeros", "scales"))
    if packing.endswith("awq"):
        return dequantize_gemm(words, zeros, scales.float(), scheme.bits, scheme.group_size).T
    inputs = words.shape[0] * 32 // scheme.bits
    kind = (qlinear_torch if packing.endswith("gptqmodel") else qlinear_torch_zp).QuantLinear
    layer = kind(scheme.bits, scheme.group_size, inputs, words.shape[1], bias=False)
    layer.qweight, layer.qzeros, layer.scales = words, zeros, scales.float()
    return layer(torch.eye(inputs)).T


def logits(source: Path, folder: Path) -> Any:
    """Of transformers' model in float32 with the matrices that AutoRound reads from the folder."""
    import torch
    from auto_round.inference.convert_model import get_layer_config
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoRoundConfig

    fields = json.loads((folder / "config.json").read_text())["quantization_config"]
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager", dtype="float32")
    schemes = get_layer_config(model, AutoRoundConfig.from_dict(dict(fields)))
    tensors = load_file(folder / "model.safetensors")
    others = {name: value.float() for name, value in tensors.items() if name in model.state_dict()}
    model.load_state_dict(others, strict=False)
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    assert len(modules) >= 6
    for name in modules:
        model.get_submodule(name).weight.data.copy_(matrix(tensors, name, schemes[name], fields["packing_format"]))
    with torch.no_grad():
        return model(torch.tensor([prompt(LENGTH, CONFIG["vocab_size"])])).logits[0].tolist()


def make(name: str) -> None:
    import auto_round
    import torch

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "plain"
        plain(source, AWQ_CONFIG if "awq" in name else CONFIG)
        made = quantise(source, Path(folder) / name, name)
        target = FOLDER / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(made / file, target / file)
        expected = {
            "made_by": f"auto-round {auto_round.__version__}, torch {torch.__version__}",
            "tokens": prompt(LENGTH, CONFIG["vocab_size"]),
            "logits": [[float(f"{x:.7g}") for x in row] for row in logits(source, made)],
        }
        (target / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
