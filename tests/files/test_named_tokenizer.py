"""Tokenizers that are named apart from their models."""

import json
from pathlib import Path

import pytest

from quire.engine.building.plan import plan_deployment
from quire.errors import InvalidSetting, ModelUnavailable
from quire.files.model_files import locate
from quire.files.named_tokenizer import locate_tokenizer
from quire.settings.config import Config
from tests.files.fake_hub import FakeHub
from tests.tiny_chat_model import CONFIG, byte_tokenizer, write_tiny_chat_model


@pytest.fixture
def named(tmp_path: Path) -> Path:
    write_tiny_chat_model(tmp_path / "named")
    return tmp_path / "named"


def test_a_model_without_a_tokenizer_gets_the_one_that_is_named(named: Path) -> None:
    assert locate("random:tiny").tokenizer is None
    for place in (named, named / "tokenizer.json"):
        assert locate("random:tiny", tokenizer=str(place)).tokenizer == named


def test_it_takes_the_place_of_the_models_own(named: Path, tmp_path: Path) -> None:
    model = write_tiny_chat_model(tmp_path / "model")
    found = plan_deployment(Config(model, tokenizer=str(named)))
    assert found.files.tokenizer == named
    assert found.files.eos_token_ids == locate(model).eos_token_ids


def test_one_of_the_hub_is_fetched_without_weights(tmp_path: Path) -> None:
    files = {"tokenizer.json": byte_tokenizer().to_str().encode(), "tokenizer_config.json": b"{}"}
    hub = FakeHub(
        {"org/model": files | {"config.json": b"{}", "model.safetensors": b"weights"}, "org/none": {"a": b""}}
    )
    with hub.running() as endpoint:
        path = locate_tokenizer("org/model", endpoint=endpoint, hub_cache=tmp_path)
        assert sorted(one.name for one in path.iterdir()) == sorted(files)
        with pytest.raises(InvalidSetting, match="tokenizer is 'org/none', which has none of tokenizer"):
            locate_tokenizer("org/none", endpoint=endpoint, hub_cache=tmp_path)
    assert locate_tokenizer("org/model", offline=True, hub_cache=tmp_path) == path


def test_one_with_more_tokens_than_the_model_is_refused(named: Path, tmp_path: Path) -> None:
    small = tmp_path / "config.json"
    small.write_text(json.dumps(CONFIG | {"vocab_size": 200}))
    with pytest.raises(InvalidSetting, match=r"tokenizer .*named has 257 tokens, random:.* has 200: it is of another"):
        plan_deployment(Config(f"random:{small}", tokenizer=str(named)))


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InvalidSetting, match=r"it can be a folder, a \.gguf file or a tokenizer\.json"):
        locate_tokenizer(str(tmp_path / "notes.txt"))
    with pytest.raises(InvalidSetting, match="which has none of tokenizer"):
        locate_tokenizer(str(tmp_path))
    with pytest.raises(ModelUnavailable, match="no such file or folder, nor a repository on the hub"):
        locate_tokenizer("/no/such/folder")
