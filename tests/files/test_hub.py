import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from quire.errors import InvalidCheckpoint, ModelUnavailable
from quire.files.model_files import locate
from tests.files.fake_hub import COMMIT, FakeHub
from tests.files.gguf_writing import LLAMA_METADATA, embedding, write_gguf

FILES = {
    "config.json": json.dumps({"model_type": "llama", "eos_token_id": 2}).encode(),
    "generation_config.json": json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}).encode(),
    "hf_quant_config.json": json.dumps({"quantization": {"quant_algo": "FP8"}}).encode(),
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


@pytest.fixture
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> FakeHub:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama", LLAMA_METADATA, embedding())
    model, other = path.read_bytes(), b"another model"
    return FakeHub(
        {
            "org/model-GGUF": {
                "README.md": b"unwanted",
                "config.json": b"{}",
                "imatrix.gguf": other,
                "mmproj-F32.gguf": other,
                "model-IQ2_XS.gguf": other,
                "model-Q8_0.gguf": model,
                "sub/model.Q4_K_M.gguf": model,
                "model-F16-00001-of-00002.gguf": other,
                "model-F16-00002-of-00002.gguf": b"the second part",
            },
            "org/both": FILES | {"model-Q8_0.gguf": model},
            "org/odd-GGUF": {"a-IQ1_S.gguf": other, "b-IQ2_S.gguf": other},
            "org/two-GGUF": {"large-Q8_0.gguf": other, "small-Q8_0.gguf": other},
            "org/cut-GGUF": {"m-Q8_0-00001-of-00002.gguf": other},
        }
    )


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


def test_the_cache_of_another_program_is_read_where_it_is(hub: FakeHub, endpoint: str, tmp_path: Path) -> None:
    locate("org/model", endpoint=endpoint, hub_cache=tmp_path, cache_dir=tmp_path / "other")
    assert [one.name for one in tmp_path.glob("models--*")] == ["models--org--model"]  # as other clients have it
    assert locate("org/model", offline=True, hub_cache=tmp_path).kind == "safetensors"
    with pytest.raises(ModelUnavailable, match="not complete in the local cache"):
        locate("org/model", offline=True, cache_dir=tmp_path)


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


def test_a_hub_that_cannot_be_reached_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client's, before it tries again
    with pytest.raises(ModelUnavailable, match=r"org/model .* the hub cannot be reached; check the network"):
        locate("org/model", endpoint="http://127.0.0.1:9", cache_dir=tmp_path)


def test_an_impossible_name_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="neither a local path nor a repository id"):
        locate("org/..name--", endpoint="http://127.0.0.1:9", cache_dir=tmp_path)


def test_of_gguf_files_the_preferred_one_is_fetched_and_no_other(ggufs: FakeHub, tmp_path: Path) -> None:
    with ggufs.running() as endpoint:
        found = locate("org/model-GGUF", endpoint=endpoint, cache_dir=tmp_path)
    assert (found.kind, found.name) == ("gguf", "org/model-GGUF")
    assert found.path is not None
    assert found.path.name == "model-Q8_0.gguf"
    assert ggufs.downloads == ["model-Q8_0.gguf"]
    assert locate("org/model-GGUF", offline=True, cache_dir=tmp_path) == found


@pytest.mark.parametrize("model", ["org/model-GGUF:q4_k_m", "org/model-GGUF/sub/model.Q4_K_M.gguf"])
def test_a_gguf_file_is_taken_by_its_type_or_name(ggufs: FakeHub, tmp_path: Path, model: str) -> None:
    with ggufs.running() as endpoint:
        found = locate(f"{model}@{COMMIT}", endpoint=endpoint, cache_dir=tmp_path)
    assert ggufs.downloads == ["sub/model.Q4_K_M.gguf"]
    assert found.name == model
    with pytest.raises(ModelUnavailable, match=r"in the local cache has no GGUF file of type Q8_0; it has sub/"):
        locate("org/model-GGUF:Q8_0", revision=COMMIT, offline=True, cache_dir=tmp_path)


def test_all_parts_of_a_split_gguf_file_are_fetched(ggufs: FakeHub, tmp_path: Path) -> None:
    with ggufs.running() as endpoint, pytest.raises(InvalidCheckpoint):  # these parts are no real ones
        locate("org/model-GGUF:F16", endpoint=endpoint, cache_dir=tmp_path)
    assert sorted(ggufs.downloads) == ["model-F16-00001-of-00002.gguf", "model-F16-00002-of-00002.gguf"]


def test_a_repository_with_both_is_read_as_safetensors_unless_a_gguf_file_is_named(
    ggufs: FakeHub, tmp_path: Path
) -> None:
    with ggufs.running() as endpoint:
        assert locate("org/both", endpoint=endpoint, cache_dir=tmp_path).kind == "safetensors"
        assert "model-Q8_0.gguf" not in ggufs.downloads
        assert locate("org/both:Q8_0", endpoint=endpoint, cache_dir=tmp_path).kind == "gguf"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/model-GGUF:Q2_K", r"org/model-GGUF has no GGUF file of type Q2_K; it has model-IQ2_XS.gguf, model-Q8_0"),
        ("org/model-GGUF/model-Q9.gguf", r"org/model-GGUF has no file 'model-Q9.gguf'; it has model-IQ2_XS.gguf"),
        ("org/model-GGUF/mmproj-F32.gguf", r"mmproj-F32.gguf is a part for other models"),
        ("org/odd-GGUF", r"org/odd-GGUF has no GGUF file of a type that is read \(Q8_0, .*it has a-IQ1_S.gguf, b-IQ2"),
        ("org/two-GGUF", r"several files of type Q8_0; name one of org/two-GGUF/large-Q8_0.gguf, org/two-GGUF/small"),
        ("org/cut-GGUF", r"m-Q8_0-00001-of-00002.gguf is one of 2 parts, of which are missing: m-Q8_0-00002-of-00002"),
    ],
)
def test_a_gguf_file_that_cannot_be_chosen_is_refused_with_those_there_are(
    ggufs: FakeHub, tmp_path: Path, model: str, message: str
) -> None:
    with ggufs.running() as endpoint, pytest.raises(ModelUnavailable, match=message):
        locate(model, endpoint=endpoint, cache_dir=tmp_path)
    assert ggufs.downloads == []
