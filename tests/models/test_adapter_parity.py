"""Adapters that PEFT made and saved, against the weights that PEFT merges them into."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.models.checkpoint import load_weights
from quire.models.registry import build_model
from tests.golden.make import reference, reference_model
from tests.models.adapter_files import modules_of
from tests.models.cases import CASES, PROMPT_LENGTH, VOCAB_SIZE
from tests.models.test_adapters import NAMES, adapted, stacks_of
from tests.models.test_parity import NEAR, UNSTEADY
from tests.models.tiny import NamedTensors, prompt, relative_error

pytestmark = pytest.mark.parity

EXPERTS = ("qwen3_moe", "glm4_moe", "qwen3_next", "granitemoehybrid")
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_rslora": True},
    "mistral": {"rank_pattern": {"q_proj": 2, r"layers\.1\..*down_proj": 6}, "alpha_pattern": {"v_proj": 3}},
    "llama": {"target_modules": "all-linear"},
    # PEFT takes the names of dense blocks for experts too.
    **{key: {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]} for key in EXPERTS},
    **{
        key: {"target_modules": ["kv_a_proj_with_mqa", "o_proj", query]}
        for key, query in (("deepseek_v2", "q_proj"), ("deepseek_v3", "q_b_proj"))
    },
    "qwen3": {"target_modules": r".*\.(q_proj|down_proj)"},
}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_peft(name: str, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    theirs = reference_model(CASES[name], tmp_path / "base")
    model = build_model(CASES[name])
    targets = sorted({module.rpartition(".")[2] for module in modules_of(model)})
    fields = {"r": 4, "lora_alpha": 6, "target_modules": targets, "fan_in_fan_out": name == "gpt2"}
    adapter = get_peft_model(theirs, LoraConfig(**(fields | OPTIONS.get(name, {}))))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in adapter.named_parameters():
            if "lora_" in parameter_name:
                parameter.copy_(torch.randn_like(parameter) / max(parameter.shape) ** 0.5)
    adapter.save_pretrained(str(tmp_path / "adapter"))
    tokens = prompt(PROMPT_LENGTH, VOCAB_SIZE)
    logits, generated, _ = reference(adapter.merge_and_unload(), tokens)

    weights = load_weights(model, NamedTensors(model), dtype="float32")
    known = [*tokens, *generated]
    if model.depends_on_length:  # what a position computes depends on how much is known
        known = tokens
    ours = adapted(model, known)(weights, stacks_of(model, [tmp_path / "adapter"], 8), 1)
    assert relative_error(ours[: len(tokens)], logits) < NEAR * UNSTEADY.get(name, 1.0)
    following = ours[len(tokens) - 1 : len(known) - 1].argmax(-1)
    assert np.array_equal(following, generated[: len(following)])
