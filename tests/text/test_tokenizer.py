"""Tokenizers of model folders: special tokens, added tokens, bos rules, spans, and what is refused."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from quire.errors import InvalidCheckpoint, InvalidRequest, UnsupportedModel
from quire.text.shield import RenderedPrompt
from quire.text.tokenizer import Tokenizer, TokenSpan, load_tokenizer
from tests.text.corpus import TEXTS
from tests.text.gguf_files import write_gguf
from tests.text.token_ids import named_id, plain_ids
from tests.text.vocabularies import byte_fallback_tokenizer, byte_level_metadata, byte_level_original


def folder_of(path: Path, backend: Backend | None = None, **files: Any) -> Path:
    """A model folder: `tokenizer_config={...}` is written as tokenizer_config.json."""
    (backend or byte_level_original("gpt-2")).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_folder_encodes_as_its_tokenizer_json(tmp_path: Path) -> None:
    original = byte_level_original("gpt-2")
    tokenizer = load_tokenizer(folder_of(tmp_path))
    assert tokenizer.encode_batch(TEXTS) == [original.encode(text).ids for text in TEXTS]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == original.decode(ids)
    assert tokenizer.vocab_size == original.get_vocab_size(with_added_tokens=True)


def test_special_tokens_are_read_from_both_files_and_the_configuration_wins(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        folder_of(
            tmp_path,
            special_tokens_map={"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"},
            tokenizer_config={"eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": None},
        )
    )
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert [named_id(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")] == [1, 2, None, None]


def test_a_token_of_the_vocabulary_that_the_configuration_calls_special_is_special(tmp_path: Path) -> None:
    config = {"eos_token": "<think>", "additional_special_tokens": ["é"], "pad_token": "[PAD]"}
    tokenizer = load_tokenizer(folder_of(tmp_path, tokenizer_config=config))
    think = named_id(tokenizer, "eos_token")
    assert think is not None
    assert tokenizer.is_special(think)
    assert tokenizer.decode(tokenizer.encode("a<think>é")) == "a"
    # Nothing in the model answers to a token that its vocabulary does not hold.
    assert named_id(tokenizer, "pad_token") is None


def test_added_tokens_of_the_configuration_get_the_ids_it_says(tmp_path: Path) -> None:
    size = byte_level_original("gpt-2").get_vocab_size(with_added_tokens=True)
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    tokenizer = load_tokenizer(
        folder_of(
            tmp_path,
            tokenizer_config={
                "added_tokens_decoder": {
                    str(size): {"content": "<tool>", "special": True, **flags},
                    str(size + 1): {"content": "<note>", "special": False, **flags},
                }
            },
            added_tokens={"<more>": size + 2},
        )
    )
    assert tokenizer.encode("<tool><note><more>") == [size, size + 1, size + 2]
    assert [tokenizer.is_special(size + offset) for offset in range(3)] == [True, False, False]
    assert tokenizer.vocab_size == size + 3


def test_an_added_token_with_another_id_than_its_own_is_refused(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"5": {"content": "<|im_end|>", "special": True}}}
    with pytest.raises(InvalidCheckpoint, match=r"<\|im_end\|>.*id 5.*not 2"):
        load_tokenizer(folder_of(tmp_path, tokenizer_config=config))


@pytest.mark.parametrize("listed", [[1, 2], {"x": {"content": "a"}}, {"300": 7}, {"9" * 5000: "a"}, "text"])
def test_added_tokens_that_are_no_table_are_refused(tmp_path: Path, listed: Any) -> None:
    with pytest.raises(
        InvalidCheckpoint, match=r"added_tokens_decoder is .*; a table from token ids to tokens is needed"
    ):
        load_tokenizer(folder_of(tmp_path, tokenizer_config={"added_tokens_decoder": listed}))


def with_bos() -> Backend:
    backend = Backend.from_str(byte_level_original("gpt-2").to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return backend


@pytest.mark.parametrize(
    ("in_file", "config", "bos", "eos"),
    [
        (False, {}, False, False),
        (True, {}, True, False),
        (True, {"add_bos_token": False}, False, False),
        (False, {"add_bos_token": True}, True, False),
        (False, {"add_bos_token": True, "add_eos_token": True}, True, True),
        (True, {"add_eos_token": True}, False, True),
    ],
)
def test_bos_follows_the_file_unless_the_configuration_says_otherwise(
    tmp_path: Path, in_file: bool, config: dict[str, bool], bos: bool, eos: bool
) -> None:
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    backend = with_bos() if in_file else None
    tokenizer = load_tokenizer(folder_of(tmp_path, backend, tokenizer_config=names | config))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [1] * bos + plain + [2] * eos


def test_special_tokens_in_text_are_parsed_or_plain(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path))
    text = "<|im_start|>hi<think>"
    assert tokenizer.encode(text)[0] == 1
    plain = tokenizer.encode_prompt(RenderedPrompt(text, standing=text))
    assert plain == plain_ids(tokenizer, text)
    assert not set(plain) & tokenizer.special_ids
    assert tokenizer.decode(plain) == text
    # Tokens that are not special are found either way, and the two ways do not get into each other.
    assert tokenizer.id_of("<think>") in plain
    assert tokenizer.encode(text)[0] == 1


def test_spans_cover_the_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of(tmp_path, with_bos()))
    text = "Hello, 你好 <|im_end|>!"
    spans = tokenizer.encode_with_spans(text)
    assert [span.id for span in spans] == tokenizer.encode(text)
    assert spans[0] == TokenSpan(1, "<|im_start|>", 0, 0)
    assert spans[1].start == 0
    assert spans[-1].stop == len(text)
    assert all(span.start <= span.stop for span in spans)
    assert {text[span.start : span.stop] for span in spans} >= {"<|im_end|>", "!"}
    assert [span.piece for span in spans] == [tokenizer.piece(span.id) for span in spans]


def test_bytes_of_tokens_add_up_to_the_text() -> None:
    for backend in (byte_level_original("gpt-2"), byte_fallback_tokenizer(False)):
        tokenizer = Tokenizer(Backend.from_str(backend.to_str()), {})
        for text in ("Hello, 你好 😀", "\x00\n"):
            ids = tokenizer.encode(text)
            assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def test_many_threads_encode_the_same() -> None:
    tokenizer = Tokenizer(Backend.from_str(byte_level_original("gpt-2").to_str()), {})
    prompts = [RenderedPrompt(text, standing) for text in TEXTS for standing in (None, text)]
    expected = {prompt: tokenizer.encode_prompt(prompt) for prompt in prompts}
    wrong: list[str] = []

    def work() -> None:
        for prompt, ids in expected.items():
            if tokenizer.encode_prompt(prompt) != ids or tokenizer.piece(ids[0] if ids else 0) == "":
                wrong.append(prompt.text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_id_outside_the_vocabulary_is_refused_with_the_limit() -> None:
    tokenizer = Tokenizer(Backend.from_str(byte_level_original("gpt-2").to_str()), {})
    last = tokenizer.vocab_size - 1
    for token_id in (last + 1, -1):
        for call in (lambda i: tokenizer.decode([0, i]), tokenizer.piece):
            with pytest.raises(InvalidRequest, match=f"{token_id} .*0 to {last}"):
                call(token_id)
        assert tokenizer.token_bytes(token_id) == b""  # a model may have a use for it


def test_half_a_surrogate_pair_is_refused_by_its_place() -> None:
    tokenizer = Tokenizer(Backend.from_str(byte_level_original("gpt-2").to_str()), {})
    for call in (tokenizer.encode, tokenizer.encode_with_spans):
        with pytest.raises(InvalidRequest, match=r"character 2 is a lone surrogate, U\+D83D"):
            call("ab\ud83d")


def test_padding_and_truncation_in_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    backend = Backend.from_str(byte_level_original("gpt-2").to_str())
    backend.enable_padding(length=64, pad_token="<|endoftext|>")
    backend.enable_truncation(3)
    tokenizer = load_tokenizer(folder_of(tmp_path, backend))
    text = "one two three four five six"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    lengths = [len(ids) for ids in tokenizer.encode_batch([text, "a"])]
    assert lengths[0] > lengths[1] == 1


def test_a_folder_without_a_tokenizer_is_reported_by_file_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "Martian"}}'])
def test_a_damaged_tokenizer_is_reported_by_file_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_an_eos_token_that_is_not_in_the_vocabulary_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"eos_token '<nowhere>'"):
        load_tokenizer(folder_of(tmp_path, tokenizer_config={"eos_token": "<nowhere>"}))


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 1}]},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}]},
    ],
)
def test_a_decoder_that_cannot_be_followed_token_by_token_is_refused(tmp_path: Path, decoder: Any) -> None:
    described = json.loads(byte_level_original("gpt-2").to_str()) | {"decoder": decoder}
    with pytest.raises(UnsupportedModel, match="decoder"):
        load_tokenizer(folder_of(tmp_path, Backend.from_str(json.dumps(described))))


def test_a_file_that_is_not_gguf_is_reported_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGML" + bytes(60))
    with pytest.raises(InvalidCheckpoint, match=r"model\.gguf"):
        load_tokenizer(file)


def test_a_gguf_file_whose_tokenizer_is_not_supported_is_reported_by_name(tmp_path: Path) -> None:
    metadata = byte_level_metadata("gpt-2") | {"tokenizer.ggml.pre": "martian"}
    with pytest.raises(UnsupportedModel, match=r"model\.gguf: tokenizer\.ggml\.pre: 'martian'"):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", "llama", metadata))


def test_a_gguf_file_encodes_as_the_tokenizer_it_was_made_from(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", "llama", byte_level_metadata("smollm")))
    original = byte_level_original("smollm")
    assert tokenizer.encode_batch(TEXTS) == [original.encode(text).ids for text in TEXTS]
