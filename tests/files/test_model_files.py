import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.errors import InvalidCheckpoint, ModelUnavailable, QuireError
from quire.files.generation_defaults import GenerationDefaults
from quire.files.model_files import locate
from quire.files.shapes import SHAPES
from tests.files.gguf_writing import LLAMA_METADATA, embedding, write_gguf

CONFIG = {"model_type": "llama", "vocab_size": 10}


def write_folder(folder: Path, config: dict[str, Any] | None = None, **files: dict[str, Any]) -> Path:
    """A model folder; `files` are more JSON files, by name without the ending."""
    folder.mkdir(exist_ok=True)
    save_file({"a": np.ones(2, np.float32)}, folder / "model.safetensors")
    for name, content in (files | {"config": config or CONFIG}).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_is_found_with_what_its_files_say(tmp_path: Path) -> None:
    generation = {"temperature": 0.7, "top_k": 40, "do_sample": True, "eos_token_id": 5, "transformers_version": "5"}
    folder = write_folder(tmp_path / "model", generation_config=generation, tokenizer={"added_tokens": []})
    found = locate(str(folder))
    assert (found.kind, found.name, found.path, found.config) == ("safetensors", "model", folder, CONFIG)
    assert found.generation == GenerationDefaults(do_sample=True, temperature=0.7, top_k=40)
    assert found.tokenizer == folder
    source = found.open_weights()
    assert source is not None
    assert set(source.tensors()) == {"a"}


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    assert locate(str(write_folder(tmp_path / "model"))).tokenizer is None


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, ()),
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": [9, 2, 9]}, {"generation_config": {"eos_token_id": [2, 7]}}, (2, 7, 9)),
        ({"eos_token_id": None}, {"generation_config": {"eos_token_id": 4}}, (4,)),
        ({"text_config": {"eos_token_id": 3}}, {}, (3,)),
        ({"eos_token_id": -1}, {"generation_config": {"eos_token_id": [-1, 4]}}, (4,)),
        (
            {"eos_token_id": 1},
            {"tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": {"8": {"content": "</s>"}}}},
            (1, 8),
        ),
        (
            {},
            {
                "tokenizer_config": {"eos_token": {"content": "<end>"}},
                "tokenizer": {"added_tokens": [{"id": 6, "content": "<end>"}, {"id": 7, "content": "<x>"}]},
            },
            (6,),
        ),
    ],
)
def test_end_of_sequence_ids_are_the_union_of_all_files(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert locate(str(write_folder(tmp_path / "m", CONFIG | config, **files))).eos_token_ids == expected


@pytest.mark.parametrize("number", [-2, 2**31])
def test_an_end_of_sequence_id_that_no_token_has_is_refused_with_its_folder(tmp_path: Path, number: int) -> None:
    folder = write_folder(tmp_path / "m", CONFIG | {"eos_token_id": [2, number]})
    with pytest.raises(InvalidCheckpoint, match=rf"m: an end-of-sequence id is {number}, which no token has"):
        locate(str(folder))


def test_a_gguf_file_is_found_with_what_its_metadata_says(tmp_path: Path) -> None:
    more = {
        "tokenizer.ggml.tokens": ["a", "<|endoftext|>", "b", "<|im_end|>", "<|eot_id|>"],
        "tokenizer.ggml.token_type": [1, 3, 1, 3, 1],  # the last looks like an end and is plain text
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 2,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    path = write_gguf(tmp_path / "tiny.gguf", "llama", LLAMA_METADATA, embedding(rows=5), more=more)
    for model in (path, tmp_path):  # the file, or the folder that has no other
        found = locate(str(model))
        assert (found.kind, found.name, found.path, found.tokenizer) == ("gguf", "tiny", path, path)
        assert found.eos_token_ids == (1, 2, 3)
        assert found.generation == GenerationDefaults(temperature=0.5, top_k=20)
        assert found.config["vocab_size"] == 5


def test_several_gguf_files_must_be_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_gguf(tmp_path / f"{name}.gguf", "llama", LLAMA_METADATA, embedding())
    with pytest.raises(InvalidCheckpoint, match=r"2 GGUF files; name one: a\.gguf, b\.gguf"):
        locate(str(tmp_path))


@pytest.mark.parametrize("shape", SHAPES)
def test_random_weights_need_only_the_name_of_a_shape(shape: str) -> None:
    found = locate(f"random:{shape}")
    assert (found.kind, found.path, found.config, found.tokenizer) == ("random", None, SHAPES[shape], None)
    assert found.open_weights() is None


def test_random_weights_take_config_and_tokenizer_from_a_folder_or_its_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG | {"eos_token_id": 1}, tokenizer={"added_tokens": []})
    (folder / "model.safetensors").unlink()
    for what in (folder, folder / "config.json"):
        found = locate(f"random:{what}")
        assert (found.kind, found.config["vocab_size"], found.tokenizer) == ("random", 10, folder)
        assert found.eos_token_ids == (1,)


def test_random_weights_take_config_and_tokenizer_from_a_gguf_file(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.eos_token_id": 0}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", LLAMA_METADATA, embedding(), more=more)
    found = locate(f"random:{path}")
    assert (found.kind, found.path, found.tokenizer, found.eos_token_ids) == ("random", None, path, (0,))


def _no_config(folder: Path) -> str:
    write_folder(folder)
    (folder / "config.json").unlink()
    return str(folder)


def _broken_config(folder: Path) -> str:
    write_folder(folder)
    (folder / "config.json").write_text("{")
    return str(folder)


def _only_pickles(folder: Path) -> str:
    write_folder(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return str(folder)


def _text_file(folder: Path) -> str:
    (folder / "model.txt").write_text("x")
    return str(folder / "model.txt")


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (_no_config, InvalidCheckpoint, r"config\.json: cannot be read: No such file"),
        (_broken_config, InvalidCheckpoint, r"config\.json: not JSON"),
        (_only_pickles, InvalidCheckpoint, r"it has pytorch_model\.bin, which can run code when read: convert"),
        (_text_file, InvalidCheckpoint, r"model\.txt: a model is a folder or a \.gguf file"),
        (lambda folder: str(folder / "gone.gguf"), ModelUnavailable, r"gone\.gguf': no such file or folder"),
        (lambda folder: str(folder / "gone" / "model"), ModelUnavailable, r"gone/model': no such file or folder"),
        (lambda folder: "gone.gguf", ModelUnavailable, r"gone\.gguf': no such file or folder"),
        (lambda folder: "", ModelUnavailable, "no such file or folder"),
        (lambda folder: "random:nothing", ModelUnavailable, r"'nothing' is neither .* nor a known shape: tiny, "),
        (lambda folder: "random:", ModelUnavailable, r"known shape"),
    ],
)
def test_what_cannot_be_found_or_read_is_explained(
    tmp_path: Path, write: Any, error: type[QuireError], message: str
) -> None:
    with pytest.raises(error, match=message):
        locate(write(tmp_path))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config": {"temperature": "hot"}}, r"generation_config\.json: temperature is 'hot'"),
        ({"generation_config": {"top_k": True}}, "top_k is True"),
        ({"generation_config": {"do_sample": 1}}, "do_sample is 1"),
        ({"generation_config": {"eos_token_id": ["x"]}}, "an end-of-sequence id is 'x'"),
    ],
)
def test_wrong_generation_defaults_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        locate(str(write_folder(tmp_path / "m", **files)))


@pytest.mark.parametrize("model", ["default", "random:tiny", "folder"])
def test_a_revision_of_what_has_none_is_refused(tmp_path: Path, model: str) -> None:
    model = str(write_folder(tmp_path / "m")) if model == "folder" else model
    with pytest.raises(ModelUnavailable, match="has no revisions, and 'v1' was asked for"):
        locate(model, revision="v1", cache_dir=tmp_path)


def test_the_default_is_unavailable_offline_before_it_was_fetched(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"smollm2-135m-instruct is not in .* fetching is off"):
        locate("default", offline=True, cache_dir=tmp_path)


@pytest.mark.parametrize("prefix", ["", "random:"])
def test_a_name_that_no_file_can_have_is_refused(prefix: str) -> None:
    with pytest.raises(ModelUnavailable, match=rf"'{prefix}x+\.\.\.x+' cannot be read: File name too long"):
        locate(prefix + "x" * 5000)
