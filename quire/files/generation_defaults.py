"""Defaults of generation that a model's own files state."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire.errors import InvalidCheckpoint, shown
from quire.files.json_file import MAX_VOCABULARY_BYTES, read_json_if_present


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling for requests that say nothing about it. None: the files are silent too."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


# For each field: its type, the values it may have, and these in words. NaN is none of them.
_PROBABILITY = (int | float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
_ALLOWED: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "do_sample": (bool, lambda value: True, "true or false"),
    "temperature": (int | float, lambda value: 0 <= value <= 100, "a number from 0 to 100"),
    "top_k": (int, lambda value: -1 <= value < 2**31, "a whole number from -1 to 2147483647"),
    "top_p": _PROBABILITY,
    "min_p": _PROBABILITY,
    "typical_p": (int | float, lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "repetition_penalty": (int | float, lambda value: 0 < value <= 100, "a number above 0 and at most 100"),
    "max_new_tokens": (int, lambda value: 0 < value < 2**31, "a whole number from 1 to 2147483647"),
}

_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Older GGUF files name one end of sequence and leave the others to the reader; a model trained to end its turn with
# one of these would run on.
_TURN_ENDS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
)
_CONTROL_TOKEN = 3


def generation_defaults(generation_config: Mapping[str, Any], origin: Path) -> GenerationDefaults:
    """Defaults from generation_config.json. Its other fields concern the library that wrote it."""
    found: dict[str, Any] = {}
    for field in fields(GenerationDefaults):
        value = generation_config.get(field.name)
        if value is None:
            continue
        kind, fits, allowed = _ALLOWED[field.name]
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)) or not fits(value):
            raise InvalidCheckpoint(f"{origin}: {field.name} is {shown(value)}; {allowed} is needed")
        found[field.name] = value
    if found.get("top_k") == -1:  # off, in the spelling of other programs
        found["top_k"] = 0
    return GenerationDefaults(**found)


def generation_defaults_from_gguf(metadata: Mapping[str, Any], origin: Path) -> GenerationDefaults:
    return generation_defaults({name: metadata.get(key) for name, key in _GGUF_KEYS.items()}, origin)


def eos_token_ids(folder: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that any of a folder's files calls the end of a sequence."""
    text_config = config.get("text_config")
    sources = [config, generation_config, text_config if isinstance(text_config, dict) else {}]
    ids = set(_integers((source.get("eos_token_id") for source in sources), folder))
    return tuple(sorted(ids | _tokenizer_eos_ids(folder)))


def eos_token_ids_from_gguf(metadata: Mapping[str, Any], origin: Path) -> tuple[int, ...]:
    ids = set(_integers((metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS), origin))
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    types = metadata.get("tokenizer.ggml.token_type", ())
    for token_id, (token, type_) in enumerate(zip(tokens, types, strict=False)):
        if type_ == _CONTROL_TOKEN and token in _TURN_ENDS:
            ids.add(token_id)
    return tuple(sorted(ids))


def _integers(values: Iterable[Any], origin: Path) -> Iterable[int]:
    for value in values:
        for item in value if isinstance(value, list) else (value,):
            if item is None or (type(item) is int and item == -1):  # both mean that there is none
                continue
            if not isinstance(item, int) or isinstance(item, bool):
                raise InvalidCheckpoint(f"{origin}: an end-of-sequence id is {shown(item)}, not an integer")
            if not 0 <= item < 2**31:
                raise InvalidCheckpoint(f"{origin}: an end-of-sequence id is {shown(item)}, which no token has")
            yield item


def _tokenizer_eos_ids(folder: Path) -> set[int]:
    """The id of the tokenizer's eos_token, which its files give by text."""
    settings = read_json_if_present(folder / "tokenizer_config.json")
    token = settings.get("eos_token")
    content = token if isinstance(token, str) else _content(token)
    if not isinstance(content, str):
        return set()
    added = settings.get("added_tokens_decoder")
    if isinstance(added, dict):
        found = {int(key) for key, entry in added.items() if _is_id(key) and _content(entry) == content}
        if found:
            return found
    tokenizer = read_json_if_present(folder / "tokenizer.json", MAX_VOCABULARY_BYTES)
    listed = tokenizer.get("added_tokens")
    entries = [entry for entry in listed if _content(entry) == content] if isinstance(listed, list) else []
    return set(_integers((entry.get("id") for entry in entries), folder / "tokenizer.json"))


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 12


def _content(entry: Any) -> Any:
    """The text of a token that is described by an object."""
    return entry.get("content") if isinstance(entry, dict) else None
