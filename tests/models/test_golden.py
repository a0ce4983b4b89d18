"""Every family and mechanism against what transformers computed, as tests/golden holds it."""

import numpy as np
import pytest

from quire.models.checkpoint import load_weights
from quire.models.registry import FAMILIES, build_model
from tests.golden.make import FOLDER, read_golden
from tests.models.cases import CASES
from tests.models.tiny import NamedTensors, PagedRun, relative_error, whole_logits


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_the_golden_ones(name: str) -> None:
    golden = read_golden(name)
    model = build_model(golden["config"])
    weights = load_weights(model, NamedTensors(model), dtype="float32")
    run = PagedRun(model, weights, len(golden["prompt"]) + len(golden["generated"]))
    logits, generated = run.generate(golden["prompt"], len(golden["generated"]))
    for position, row in golden["logits"].items():
        assert relative_error(logits[int(position)], np.asarray(row)) < 1e-4
    assert generated == golden["generated"]


def test_every_family_has_a_golden_file() -> None:
    # Configs of `gemma3` and `llama4` are those of their text with a vision tower beside it; the towers are
    # test_parity.py's.
    assert {config["model_type"] for config in CASES.values()} == set(FAMILIES) - {"gemma3", "llama4"}
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe"])
def test_the_forward_over_pages_and_the_one_without_agree(name: str) -> None:
    model = build_model(CASES[name])
    weights = load_weights(model, NamedTensors(model), dtype="float32")
    tokens = read_golden(name)["prompt"]
    paged = PagedRun(model, weights, len(tokens)).prefill(tokens)
    assert relative_error(paged, whole_logits(model, weights, tokens)) < 1e-5
