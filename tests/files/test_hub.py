import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from quire.errors import ModelUnavailable
from quire.files import locate
from tests.files.fake_hub import COMMIT, FakeHub

FILES = {
    "config.json": json.dumps({"model_type": "llama", "eos_token_id": 2}).encode(),
    "generation_config.json": json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}).encode(),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": save({"a": np.ones(4, np.float32)}),
    "pytorch_model.bin": b"unwanted",
    "consolidated.safetensors": b"unwanted",
    "original/model.safetensors": b"unwanted",
    "README.md": b"unwanted",
}
WANTED = {name for name, content in FILES.items() if content != b"unwanted"}


@pytest.fixture(scope="module")
def hub() -> FakeHub:
    return FakeHub({"org/model": FILES, "org/gated": FILES}, gated=frozenset({"org/gated"}))


@pytest.fixture(scope="module")
def endpoint(hub: FakeHub) -> Iterator[str]:
    with hub.running() as url:
        yield url


def test_a_repository_is_fetched_once_and_then_found_offline(hub: FakeHub, endpoint: str, tmp_path: Path) -> None:
    hub.downloads.clear()
    found = locate("org/model", endpoint=endpoint, cache_dir=tmp_path)
    assert (found.kind, found.name, found.eos_token_ids) == ("safetensors", "org/model", (2, 7))
    assert found.generation.temperature == 0.6
    assert found.tokenizer == found.path
    assert sorted(hub.downloads) == sorted(WANTED)
    weights = found.open_weights()
    assert weights is not None
    np.testing.assert_array_equal(weights.read("a"), np.ones(4))

    again = locate("org/model", offline=True, cache_dir=tmp_path)
    assert again == found
    assert len(hub.downloads) == len(WANTED)


@pytest.mark.parametrize("how", ["at sign", "argument", "both"])
def test_a_revision_is_fetched(endpoint: str, tmp_path: Path, how: str) -> None:
    model = "org/model" if how == "argument" else f"org/model@{COMMIT}"
    revision = None if how == "at sign" else COMMIT
    found = locate(model, revision=revision, endpoint=endpoint, cache_dir=tmp_path)
    assert found.path is not None
    assert found.path.name == COMMIT


def test_two_different_revisions_are_refused(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="names a revision, and 'v2' was asked for besides"):
        locate("org/model@v1", revision="v2", endpoint=endpoint, cache_dir=tmp_path)


def test_an_unknown_revision_is_named(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="org/model has no revision 'v9'"):
        locate("org/model@v9", endpoint=endpoint, cache_dir=tmp_path)


def test_an_unknown_repository_is_named(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="org/nothing is neither a local path nor a repository on the hub"):
        locate("org/nothing", endpoint=endpoint, cache_dir=tmp_path)


def test_a_gated_repository_needs_its_token(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"org/gated is gated: accept its terms .* token"):
        locate("org/gated", endpoint=endpoint, cache_dir=tmp_path)
    assert locate("org/gated", endpoint=endpoint, cache_dir=tmp_path, token="secret").kind == "safetensors"


def test_what_was_never_fetched_is_not_there_offline(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="org/model is not complete in the local cache and fetching is off"):
        locate("org/model", offline=True, cache_dir=tmp_path)


def test_a_hub_that_cannot_be_reached_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"org/model .* the hub cannot be reached; check the network"):
        locate("org/model", endpoint="http://127.0.0.1:9", cache_dir=tmp_path)


def test_an_impossible_name_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="neither a local path nor a repository id"):
        locate("org/..name--", endpoint="http://127.0.0.1:9", cache_dir=tmp_path)
