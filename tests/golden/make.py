"""Writes what transformers computes for every case, so that models can be checked where it is not installed.

    python -m tests.golden.make [CASE ...]

The weights are not stored: each is made from its name and shape (`tests/models/tiny.py`).
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from quire.models.registry import build_model
from tests.models.cases import CASES, NUM_GENERATED, PROMPT_LENGTH, VOCAB_SIZE
from tests.models.tiny import NamedTensors, prompt

FOLDER = Path(__file__).parent
STORED_POSITIONS = (0, PROMPT_LENGTH // 2, PROMPT_LENGTH - 1)
# The best two tokens are never closer, in parts of the largest logit: rounding cannot change which is first.
MIN_MARGIN = 1e-4
# A continuation that repeats itself would hide mistakes.
MIN_DISTINCT = 8


def reference_model(config: dict[str, Any], folder: Path) -> Any:
    """The model in transformers, from a checkpoint that it finds neither missing nor extra tensors in."""
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM

    source = NamedTensors(build_model(config))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.ascontiguousarray(source.read(name)) for name in source.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32", output_loading_info=True
    )
    problems = {kind: names for kind, names in report.items() if names}
    if problems:
        raise ValueError(f"transformers does not read this checkpoint as Quire does: {problems}")
    return model.eval()


def reference(model: Any, tokens: list[int]) -> tuple[np.ndarray[Any, Any], list[int], float]:
    """The logits of the prompt, the greedy continuation, and the least margin by which a token of it won."""
    import torch

    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_GENERATED,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    steps = np.sort(torch.cat(out.logits).numpy(), axis=-1)
    margin = float(((steps[:, -1] - steps[:, -2]) / np.abs(steps).max(-1)).min())
    return logits, out.sequences[0, len(tokens) :].tolist(), margin


def golden_path(name: str) -> Path:
    return FOLDER / f"{name}.json"


def read_golden(name: str) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads(golden_path(name).read_text())
    return golden


def make(name: str) -> None:
    for seed in range(100):
        tokens = prompt(PROMPT_LENGTH, VOCAB_SIZE, seed)
        # Anew for each: some ropes of transformers remember the sequences they saw.
        with tempfile.TemporaryDirectory() as folder:
            logits, generated, margin = reference(reference_model(CASES[name], Path(folder)), tokens)
        if margin > MIN_MARGIN and len(set(generated)) >= MIN_DISTINCT:
            break
    else:
        raise ValueError(f"{name}: no prompt has a continuation that is varied and clear")
    golden = {
        "config": CASES[name],
        "prompt": tokens,
        "logits": {str(i): [float(f"{value:.6g}") for value in logits[i]] for i in STORED_POSITIONS},
        "generated": generated,
    }
    golden_path(name).write_text(json.dumps(golden) + "\n")
    print(f"{name}: prompt {seed}, {len(set(generated))} distinct tokens, margin {margin:.1e}", flush=True)


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
