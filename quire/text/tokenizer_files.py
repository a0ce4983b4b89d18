"""A tokenizer as the files that transformers reads, also where the model came as one GGUF file."""

import json
from pathlib import Path
from typing import Any

from quire.errors import InvalidSetting
from quire.text.chat import DEFAULT, ChatTemplates
from quire.text.tokenizer import Tokenizer


def tokenizer_config(tokenizer: Tokenizer, max_tokens: int | None) -> dict[str, Any]:
    """The content of tokenizer_config.json, without chat templates."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
        "added_tokens_decoder": tokenizer.added_tokens(),
    }
    return config if max_tokens is None else config | {"model_max_length": max_tokens}


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, templates: ChatTemplates, *, max_tokens: int | None
) -> list[Path]:
    """Write the files, from which `load_tokenizer` and transformers' AutoTokenizer make the same tokenizer."""
    texts = {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": _as_json(tokenizer_config(tokenizer, max_tokens)),
        "special_tokens_map.json": _as_json(tokenizer.special_tokens),
    }
    for name in templates.names:
        place = "chat_template.jinja" if name == DEFAULT else f"additional_chat_templates/{name}.jinja"
        texts[place] = templates.select(name).source
    files = [folder / name for name in texts]
    there = [file for file in files if file.exists()]
    if there:
        raise InvalidSetting(f"{there[0]} exists; choose a folder without the files of a tokenizer")
    try:
        for file, text in zip(files, texts.values(), strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidSetting(f"{folder} cannot be written: {error.strerror}") from error
    return files


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
