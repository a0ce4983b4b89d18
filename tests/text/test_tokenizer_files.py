"""Tokenizers written as files are the same tokenizers."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main
from quire.errors import InvalidSetting
from quire.text.chat import ChatTemplate, ChatTemplates, load_chat_templates
from quire.text.tokenizer import Tokenizer, load_tokenizer
from quire.text.tokenizer_files import write_tokenizer
from tests.text.corpus import TEXTS
from tests.text.gguf_files import write_gguf
from tests.text.vocabularies import byte_level_metadata
from tests.tiny_chat_model import write_tiny_chat_model

SENTENCE_PIECE = json.loads((Path(__file__).parent / "golden" / "sentencepiece.json").read_text(encoding="utf-8"))
TEMPLATES = {"default": "{{ messages[0].content }}{{ bos_token }}", "tool_use": "{{ tools }}"}
METADATA = {
    "byte-level": ("llama", byte_level_metadata("llama-bpe", ("<think>",))),
    **{name: ("llama", each["metadata"]) for name, each in SENTENCE_PIECE.items()},
}


def exported(folder: Path, name: str) -> tuple[Tokenizer, Path]:
    """The tokenizer of a GGUF file, and the folder of its files."""
    architecture, metadata = METADATA[name]
    ours = load_tokenizer(write_gguf(folder / "model.gguf", architecture, metadata))
    templates = ChatTemplates({one: ChatTemplate(source, name=one) for one, source in TEMPLATES.items()})
    write_tokenizer(folder / "out", ours, templates, max_tokens=77)
    return ours, folder / "out"


@pytest.mark.parametrize("name", METADATA)
def test_the_files_of_a_gguf_model_are_its_tokenizer(tmp_path, name):
    ours, folder = exported(tmp_path, name)
    again = load_tokenizer(folder)
    assert again.special_tokens == ours.special_tokens
    assert again.special_ids == ours.special_ids
    for text in TEXTS:
        tokens = ours.encode(text)
        assert again.encode(text) == tokens
        assert again.decode(tokens, skip_special_tokens=False) == ours.decode(tokens, skip_special_tokens=False)
    templates = load_chat_templates(folder, again.special_tokens)
    assert {one: templates.select(one).source for one in templates.names} == TEMPLATES
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 77


@pytest.mark.parity
@pytest.mark.parametrize("name", METADATA)
def test_transformers_loads_the_files_as_the_same_tokenizer(tmp_path, name):
    from transformers import AutoTokenizer

    ours, folder = exported(tmp_path, name)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    assert theirs.model_max_length == 77
    assert {one: getattr(theirs, one) for one in ours.special_tokens} == ours.special_tokens
    for text in TEXTS:
        tokens = ours.encode(text)
        assert theirs(text)["input_ids"] == tokens, text
        for skip in (True, False):
            assert theirs.decode(tokens, skip_special_tokens=skip) == ours.decode(tokens, skip_special_tokens=skip), (
                text
            )
    chat = [{"role": "user", "content": "hello"}]
    rendered = ChatTemplate(TEMPLATES["default"], special_tokens=ours.special_tokens).render(chat)
    assert theirs.apply_chat_template(chat, tokenize=False) == rendered


def test_files_that_are_there_are_not_overwritten(tmp_path):
    ours, folder = exported(tmp_path, "byte-level")
    with pytest.raises(InvalidSetting, match=r"tokenizer\.json exists"):
        write_tokenizer(folder, ours, ChatTemplates({}), max_tokens=None)


def test_the_command_writes_the_tokenizer_of_the_model_it_is_given(tmp_path, capsys):
    model = write_tiny_chat_model(tmp_path / "model")
    arguments = ["tokenizer", "export", str(tmp_path / "files"), f"--model={model}"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--chat-template={{ messages }}"])
    assert not end.value.code
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {file.name for file in written} >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert all(file.is_file() for file in written)
    assert load_tokenizer(tmp_path / "files").encode("hello") == load_tokenizer(tmp_path / "model").encode("hello")
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "exists; choose a folder" in capsys.readouterr().err
