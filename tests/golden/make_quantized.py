"""Writes checkpoints that gptqmodel quantised, and the logits that it computes of them.

    python -m tests.golden.make_quantized [CASE ...]

Ran once with gptqmodel 7.7.0 and torch 2.13.0 on a CPU. It is no dependency of the tests: they read the files. On a
machine with two cores it needs GPTQMODEL_CPU_WORKERS=2.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.make import reference_model
from tests.models.tiny import prompt

FOLDER = Path(__file__).parent / "quantized"
LENGTH = 12
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Its AWQ needs multiples of 64 outputs.
AWQ_CONFIG = {**CONFIG, "num_key_value_heads": 4, "intermediate_size": 128}
# Arguments of gptqmodel's QuantizeConfig.
GPTQ: dict[str, Any] = {"method": "gptq", "format": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
CASES: dict[str, dict[str, Any]] = {
    "gptq-4": GPTQ,
    "gptq-4-act-order": {**GPTQ, "desc_act": True},
    "gptq-4-asymmetric": {**GPTQ, "sym": False, "desc_act": True},
    "gptq-4-v2": {**GPTQ, "format": "gptq_v2", "sym": False, "desc_act": True},
    "gptq-4-one-group": {**GPTQ, "group_size": -1, "sym": False, "act_group_aware": False},
    "gptq-4-one-group-act-order": {**GPTQ, "group_size": -1, "desc_act": True},
    "gptq-8": {**GPTQ, "bits": 8},
    "gptq-8-asymmetric": {**GPTQ, "bits": 8, "sym": False, "desc_act": True},
    "gptq-8-v2": {**GPTQ, "bits": 8, "format": "gptq_v2", "sym": False},
    "awq": {"method": "awq", "format": "gemm", "bits": 4, "group_size": 32, "sym": False},
    "awq-one-group": {"method": "awq", "format": "gemm", "bits": 4, "group_size": -1, "sym": False},
}


def plain(folder: Path, config: dict[str, Any]) -> None:
    """A float checkpoint with a tokenizer. Every third output has positive weights, so that its zero points are 0."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = reference_model(config, folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight[::3] = weight[::3].abs() + 0.2
    model.half().save_pretrained(folder)
    words = {f"w{i}": i for i in range(CONFIG["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w1").save_pretrained(folder)


def quantise(source: Path, folder: Path, config: dict[str, Any]) -> None:
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    model = GPTQModel.load(
        str(source), QuantizeConfig(**config, pack_impl="original", offload_to_disk=False), device="cpu"
    )
    texts = [prompt(64, CONFIG["vocab_size"], seed) for seed in range(32)]
    examples = [
        {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        for ids in texts
    ]
    model.quantize(examples, batch_size=1)
    model.save(str(folder))


def logits(source: Path, folder: Path, config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Of transformers' model in float32 with the matrices that gptqmodel reads from the folder."""
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from transformers import AutoModelForCausalLM

    is_awq = config["method"] == "awq"
    backend = BACKEND.AWQ_TORCH if is_awq else BACKEND.GPTQ_TORCH
    coded = GPTQModel.load(str(folder), backend=backend, device="cpu", dtype=torch.float16).model
    wide = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager", dtype="float32")
    # AWQ moves scales of activations into norms.
    others = {name: value.float() for name, value in coded.state_dict().items() if name in wide.state_dict()}
    wide.load_state_dict(others, strict=False)
    num_replaced = 0
    for name, module in coded.named_modules():
        if isinstance(module, BaseQuantLinear):
            module.scales = module.scales.float()
            if is_awq:
                matrix = dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)
            else:
                matrix = type(module).dequantize_weight(module.eval())  # not its compiled form
            wide.get_submodule(name).weight.data.copy_(matrix.T)
            num_replaced += 1
    assert num_replaced == 7 * CONFIG["num_hidden_layers"]
    with torch.no_grad():
        ids = torch.tensor([prompt(LENGTH, CONFIG["vocab_size"])])
        return wide.eval()(ids).logits[0].numpy()  # type: ignore[no-any-return]


def make(name: str) -> None:
    import gptqmodel
    import torch

    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "plain", Path(folder) / "made"
        plain(source, AWQ_CONFIG if CASES[name]["method"] == "awq" else CONFIG)
        quantise(source, made, CASES[name])
        target = FOLDER / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(made / file, target / file)
        expected = {
            "made_by": f"gptqmodel {gptqmodel.__version__}, torch {torch.__version__}",
            "tokens": prompt(LENGTH, CONFIG["vocab_size"]),
            "logits": [[float(f"{x:.7g}") for x in row] for row in logits(source, made, CASES[name]).tolist()],
        }
        (target / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
