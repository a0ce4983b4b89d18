"""Tokenizers rebuilt from GGUF metadata give what the tokenizers they were converted from give."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidCheckpoint, UnsupportedModel
from quire.text.chat import load_chat_templates
from quire.text.split_rules import SPLIT_RULES
from quire.text.tokenizer import tokenizer_from_gguf
from tests.text.corpus import TEXTS
from tests.text.gguf_files import write_gguf
from tests.text.token_ids import named_id, plain_ids
from tests.text.vocabularies import BYTE_LEVEL_ORIGINALS, byte_level_metadata, byte_level_original

GOLDEN = json.loads((Path(__file__).parent / "golden" / "sentencepiece.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("pre", BYTE_LEVEL_ORIGINALS)
def test_a_byte_level_vocabulary_encodes_as_its_original(pre: str) -> None:
    original = byte_level_original(pre)
    rebuilt = tokenizer_from_gguf(byte_level_metadata(pre))
    for text in TEXTS:
        expected = original.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text, add_special_tokens=False) == expected, text
        assert rebuilt.decode(expected, skip_special_tokens=False) == original.decode(expected, False), text


@given(pre=st.sampled_from(sorted(BYTE_LEVEL_ORIGINALS)), text=st.text(max_size=40))
def test_a_byte_level_vocabulary_encodes_any_text_as_its_original(pre: str, text: str) -> None:
    expected = byte_level_original(pre).encode(text, add_special_tokens=False).ids
    assert tokenizer_from_gguf_cached(pre).encode(text, add_special_tokens=False) == expected


def tokenizer_from_gguf_cached(pre: str, cache: dict[str, Any] = {}) -> Any:  # noqa: B006  a cache
    if pre not in cache:
        cache[pre] = tokenizer_from_gguf(byte_level_metadata(pre))
    return cache[pre]


@pytest.mark.parametrize("variant", GOLDEN)
def test_a_sentencepiece_vocabulary_encodes_and_decodes_as_sentencepiece(variant: str) -> None:
    golden = GOLDEN[variant]
    tokenizer = tokenizer_from_gguf(golden["metadata"])
    for text, ids, decoded in zip(TEXTS, golden["encoded"], golden["decoded"], strict=True):
        # SentencePiece knows no special tokens in text.
        assert plain_ids(tokenizer, text) == ids, text
        assert tokenizer.decode(ids) == decoded, text


def test_bos_is_added_where_the_file_or_the_rule_says_so() -> None:
    metadata = GOLDEN["prefixed"]["metadata"]
    bos = metadata["tokenizer.ggml.bos_token_id"]
    eos = metadata["tokenizer.ggml.eos_token_id"]
    assert tokenizer_from_gguf(metadata).encode("a")[0] == bos
    assert tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_bos_token": False}).encode("a")[0] != bos
    assert tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_eos_token": True}).encode("a")[-1] == eos
    assert tokenizer_from_gguf(metadata).encode("a", add_special_tokens=False)[0] != bos

    llama = byte_level_metadata("llama-bpe")
    bos = llama["tokenizer.ggml.bos_token_id"]
    assert tokenizer_from_gguf(llama).encode("a")[0] == bos
    assert tokenizer_from_gguf(llama | {"tokenizer.ggml.pre": "qwen2"}).encode("a")[0] != bos


def test_special_tokens_have_their_names() -> None:
    tokenizer = tokenizer_from_gguf(GOLDEN["prefixed"]["metadata"])
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert [named_id(tokenizer, f"{name}_token") for name in ("unk", "bos", "eos", "pad")] == [0, 1, 2, None]


def test_a_user_defined_token_is_found_whole_and_is_not_special() -> None:
    tokenizer = tokenizer_from_gguf(GOLDEN["unprefixed"]["metadata"])
    token = tokenizer.id_of("<div>")
    assert token is not None
    ids = plain_ids(tokenizer, "a<div>b")
    assert token in ids
    assert not tokenizer.is_special(token)
    assert tokenizer.decode(ids) == "a<div>b"


def test_a_word_that_is_a_token_is_taken_whole_where_the_rule_says_so() -> None:
    metadata = byte_level_metadata("llama-bpe")
    # No merges lead to this token.
    tokens = [*metadata["tokenizer.ggml.tokens"], "Ġzyxw"]
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1],
    }
    assert tokenizer_from_gguf(metadata).encode(" zyxw", add_special_tokens=False) == [len(tokens) - 1]
    metadata["tokenizer.ggml.pre"] = "dbrx"
    assert len(tokenizer_from_gguf(metadata).encode(" zyxw", add_special_tokens=False)) > 1


def test_plain_text_never_merges_into_a_control_token() -> None:
    tokens = ["<unk>", "<s>", "<", "s", ">", "s>", "▁"]
    tokenizer = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 1, 1, 1, 1, 1],
            "tokenizer.ggml.scores": [0.0, 9.0, -1.0, -1.0, -1.0, 1.0, -1.0],
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
        }
    )
    pieces = [tokenizer.piece(token_id) for token_id in plain_ids(tokenizer, "<s>", add_special_tokens=True)]
    assert pieces == ["<s>", "▁", "<", "s>"]
    assert tokenizer.encode("<s>") == [1, 1]


def test_every_split_rule_is_a_pattern_the_library_takes() -> None:
    metadata = byte_level_metadata("gpt-2")
    for name in SPLIT_RULES:
        tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": name})
        text = "Hello  World's 12345 你好\n\n x"
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"tokenizer.ggml.pre": "martian"}, UnsupportedModel, ("tokenizer.ggml.pre", "'martian'", "qwen2")),
        ({"tokenizer.ggml.model": "rwkv"}, UnsupportedModel, ("tokenizer.ggml.model", "'rwkv'", "gpt2")),
        ({"tokenizer.ggml.model": None}, InvalidCheckpoint, ("tokenizer.ggml.model",)),
        ({"tokenizer.ggml.tokens": None}, InvalidCheckpoint, ("tokenizer.ggml.tokens",)),
        ({"tokenizer.ggml.tokens": "abc"}, InvalidCheckpoint, ("tokenizer.ggml.tokens", "str")),
        ({"tokenizer.ggml.merges": None}, InvalidCheckpoint, ("tokenizer.ggml.merges",)),
        ({"tokenizer.ggml.merges": ["q zz"]}, InvalidCheckpoint, ("tokenizer.ggml.merges", "'q zz'")),
        ({"tokenizer.ggml.token_type": [1]}, InvalidCheckpoint, ("tokenizer.ggml.token_type", "1")),
        ({"tokenizer.ggml.eos_token_id": 10**6}, InvalidCheckpoint, ("eos_token_id", "1000000")),
        ({"tokenizer.ggml.tokens": [[1]]}, InvalidCheckpoint, ("tokenizer.ggml.tokens", "list")),
        ({"tokenizer.ggml.merges": [1]}, InvalidCheckpoint, ("tokenizer.ggml.merges", "int")),
        ({"tokenizer.ggml.token_type": 5}, InvalidCheckpoint, ("tokenizer.ggml.token_type", "int")),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, InvalidCheckpoint, ("eos_token_id", "str")),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, InvalidCheckpoint, ("tokenizer.ggml.pre", "list")),
    ],
)
def test_metadata_that_cannot_be_followed_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], names: tuple[str, ...]
) -> None:
    metadata = {key: value for key, value in (byte_level_metadata("gpt-2") | changes).items() if value is not None}
    with pytest.raises(error) as raised:
        tokenizer_from_gguf(metadata)
    for name in names:
        assert name in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, InvalidCheckpoint, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": ["a"]}, InvalidCheckpoint, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, UnsupportedModel, "remove_extra_whitespaces"),
        ({"tokenizer.ggml.precompiled_charsmap": [1]}, UnsupportedModel, "precompiled_charsmap"),
    ],
)
def test_sentencepiece_metadata_that_cannot_be_followed_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=name):
        tokenizer_from_gguf(GOLDEN["prefixed"]["metadata"] | changes)


def test_a_token_with_two_ids_is_refused_by_name() -> None:
    metadata = byte_level_metadata("gpt-2")
    tokens = [*metadata["tokenizer.ggml.tokens"][:-1], metadata["tokenizer.ggml.tokens"][5]]
    with pytest.raises(InvalidCheckpoint, match=f"two ids, 5 and {len(tokens) - 1}"):
        tokenizer_from_gguf(metadata | {"tokenizer.ggml.tokens": tokens})


@pytest.mark.parametrize("key", ["padding_token_id", "seperator_token_id", "mask_token_id"])
def test_a_special_token_that_nothing_needs_may_be_missing(key: str) -> None:
    """Files of models without one have -1 in its place."""
    metadata = byte_level_metadata("gpt-2")
    found = tokenizer_from_gguf(metadata | {f"tokenizer.ggml.{key}": 2**32 - 1})
    assert found.special_tokens == tokenizer_from_gguf(metadata).special_tokens


def test_a_chat_template_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", {"tokenizer.chat_template": 5})
    with pytest.raises(InvalidCheckpoint, match=r"m\.gguf: chat template 'default' is 5, not a text"):
        load_chat_templates(file, {})
