"""A model that guesses beside another: its place in memory, and the reasons to refuse it."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.building.deployment import Deployment
from quire.engine.building.plan import plan_deployment
from quire.errors import InvalidSetting
from quire.settings.config import Config
from tests.models.cases import CASES
from tests.tiny_chat_model import write_tiny_chat_model

SIZES: dict[str, Any] = {"dtype": "float32", "page_size": 8, "max_batch_size": 4, "max_total_tokens": 128}


def written(folder: Path, name: str, **changes: Any) -> str:
    path = folder / f"{name}-{len(list(folder.iterdir()))}" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**CASES[name], **changes}))
    return f"random:{path}"


def planned(folder: Path, model: str, draft: str | None, **changes: Any) -> Deployment:
    settings = SIZES | {"speculate": 4} | changes
    return plan_deployment(Config(model, draft_model=draft, cache_dir=folder, **settings))


def test_its_weights_and_pages_are_counted(tmp_path: Path) -> None:
    model = written(tmp_path, "llama")
    alone, drafted = planned(tmp_path, model, None), planned(tmp_path, model, model)
    assert drafted.facts.weight_bytes == 2 * alone.facts.weight_bytes
    assert drafted.page_bytes == 2 * alone.page_bytes
    assert alone.page_bytes == alone.layout.page_bytes


def test_guesses_have_room_in_every_step(tmp_path: Path) -> None:
    deployment = planned(tmp_path, written(tmp_path, "llama"), None)
    assert (deployment.limits.max_guesses, deployment.shapes.guesses) == (4, 4)
    assert deployment.shapes.num_samples == 4 + deployment.limits.max_step_guesses
    assert {choice.name: choice.value for choice in deployment.choices}["speculate"] == 4


def test_without_speculate_nothing_is_kept_for_it(tmp_path: Path) -> None:
    deployment = planned(tmp_path, written(tmp_path, "llama"), None, speculate=0)
    assert (deployment.shapes.guesses, deployment.shapes.num_samples) == (0, 4)
    assert "speculate" not in {choice.name for choice in deployment.choices}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculate": 0}, "draft_model is .*; it needs speculate"),
        ({"speculate": -1}, "speculate is -1; it must be at least 0"),
        ({"speculate": 8}, "speculate is 8; it must be less than page_size, 8"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = written(tmp_path, "llama")
    with pytest.raises(InvalidSetting, match=message):
        planned(tmp_path, model, model, **changes)


def test_another_number_of_tokens_is_refused(tmp_path: Path) -> None:
    model, other = written(tmp_path, "llama"), written(tmp_path, "llama", vocab_size=77)
    with pytest.raises(InvalidSetting, match=r"has 77 tokens, .* must have the same vocabulary"):
        planned(tmp_path, model, other)


def test_other_tokens_are_refused_by_the_first_that_differs(tmp_path: Path) -> None:
    model, other = write_tiny_chat_model(tmp_path / "one"), write_tiny_chat_model(tmp_path / "other")
    planned(tmp_path, model, other)
    tokenizer = tmp_path / "other" / "tokenizer.json"
    changed = json.loads((tmp_path / "one" / "tokenizer.json").read_text())
    vocabulary = changed["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    tokenizer.write_text(json.dumps(changed))
    with pytest.raises(InvalidSetting, match=r"token \d+ is b'B' there and b'A' here"):
        planned(tmp_path, model, other)


def test_a_model_of_windows_alone_is_refused(tmp_path: Path) -> None:
    model, draft = written(tmp_path, "mistral"), written(tmp_path, "llama", vocab_size=CASES["mistral"]["vocab_size"])
    with pytest.raises(InvalidSetting, match=r"draft_model is .*; it does not go with the windows of all layers of"):
        planned(tmp_path, model, draft)


def test_a_draft_with_latent_attention_is_refused_beside_a_cache_of_eight_bits(tmp_path: Path) -> None:
    model, draft = written(tmp_path, "llama"), written(tmp_path, "deepseek_v3", vocab_size=CASES["llama"]["vocab_size"])
    planned(tmp_path, model, draft)
    for asked, named in (("int8", "int8"), ("fp8", "fp8_e4m3")):
        rule = rf"kv_cache_dtype is {named}; .* the latent attention layers of .*, the draft_model: .*-dtype float32"
        with pytest.raises(InvalidSetting, match=rule):
            planned(tmp_path, model, draft, kv_cache_dtype=asked)


def test_a_draft_with_too_few_positions_is_refused(tmp_path: Path) -> None:
    model, draft = written(tmp_path, "llama"), written(tmp_path, "llama", max_position_embeddings=64)
    with pytest.raises(InvalidSetting, match="has 64 positions; max_total_tokens is 128"):
        planned(tmp_path, model, draft)
