"""Tokenizers agree with the ones transformers makes of the same files."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from quire.files.model_files import locate
from quire.text.chat import load_chat_templates
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.conversations import CONVERSATIONS
from tests.text.corpus import TEXTS, has_numerals_beyond_ascii
from tests.text.default_model import DEFAULT_GOLDEN, describe_default_model
from tests.text.gguf_files import write_gguf
from tests.text.templates import TEMPLATES
from tests.text.token_ids import named_id
from tests.text.vocabularies import byte_fallback_tokenizer, byte_level_metadata, byte_level_original

pytestmark = pytest.mark.parity

SENTENCE_PIECE = json.loads((Path(__file__).parent / "golden" / "sentencepiece.json").read_text(encoding="utf-8"))


def by_transformers(path: Path) -> Any:
    from transformers import AutoTokenizer

    if path.is_file():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(path)


def check_equal(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    for text in texts:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids, text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, text


@pytest.fixture(scope="module")
def default_model() -> Path:
    path = locate("default").tokenizer
    assert path is not None
    return path


@pytest.fixture(scope="module")
def default_reference(default_model: Path) -> Any:
    return by_transformers(default_model)


def test_the_default_model_has_the_tokenizer_that_transformers_reads_from_its_file(
    default_model: Path, default_reference: Any
) -> None:
    texts = [text for text in TEXTS if not has_numerals_beyond_ascii(text)]
    check_equal(load_tokenizer(default_model), default_reference, texts)


def test_the_default_model_has_the_chat_template_that_transformers_reads_from_its_file(
    default_model: Path, default_reference: Any
) -> None:
    template = load_chat_templates(default_model, load_tokenizer(default_model).special_tokens).select()
    for conversation in CONVERSATIONS.values():
        messages = conversation["messages"]
        if isinstance(messages[0]["content"], str):
            expected = default_reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert template.render(messages) == expected


def test_the_golden_file_is_what_transformers_says(default_reference: Any) -> None:
    assert json.loads(DEFAULT_GOLDEN.read_text(encoding="utf-8")) == describe_default_model(default_reference)


@pytest.mark.parametrize(
    ("architecture", "pre"), [("llama", "smollm"), ("llama", "llama-bpe"), ("llama", "gpt-2"), ("qwen2", "qwen2")]
)
def test_a_byte_level_gguf_file_agrees_with_transformers(tmp_path: Path, architecture: str, pre: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", architecture, byte_level_metadata(pre, ("<think>",)))
    ours, theirs = load_tokenizer(path), by_transformers(path)
    if pre == "smollm":
        check_equal(ours, theirs, [text for text in TEXTS if not any(map(str.isnumeric, text))])
    elif pre == "qwen2":
        # transformers leaves out the composition of characters that Qwen's own tokenizer.json has.
        check_equal(ours, theirs, [text for text in TEXTS if unicodedata.is_normalized("NFC", text)])
    else:
        check_equal(ours, theirs, TEXTS)


@pytest.mark.parametrize(("architecture", "variant"), [("phi3", "prefixed"), ("gemma2", "unprefixed")])
def test_a_sentencepiece_gguf_file_agrees_with_transformers(tmp_path: Path, architecture: str, variant: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", architecture, SENTENCE_PIECE[variant]["metadata"])
    # transformers merges long runs of spaces in halves, where SentencePiece finds the longest piece, and gives every
    # Gemma a <bos>, which this small one does not have.
    texts = [text for text in TEXTS if " " * 16 not in text and "<bos>" not in text]
    check_equal(load_tokenizer(path), by_transformers(path), texts)


def saved(path: Path, backend: Backend, **options: Any) -> Path:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
@pytest.mark.parametrize("rules", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_a_folder_that_transformers_saved_agrees_with_transformers(
    tmp_path: Path, kind: str, rules: dict[str, bool]
) -> None:
    backend, bos, eos = {
        "byte-level": (byte_level_original("llama-bpe"), "<|im_start|>", "<|im_end|>"),
        "byte fallback": (byte_fallback_tokenizer(), "<s>", "</s>"),
    }[kind]
    backend = Backend.from_str(backend.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    names = {
        "bos_token": bos,
        "eos_token": eos,
        "additional_special_tokens": ["<think>"] if kind == "byte-level" else [],
    }
    path = saved(tmp_path, backend, **names, **rules)
    ours, theirs = load_tokenizer(path), by_transformers(path)
    check_equal(ours, theirs, TEXTS)
    assert ours.encode_batch(TEXTS) == theirs(TEXTS)["input_ids"]
    assert (named_id(ours, "bos_token"), named_id(ours, "eos_token")) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids >= set(theirs.all_special_ids)


def test_several_templates_that_transformers_saved_are_selected_as_in_transformers(tmp_path: Path) -> None:
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    sources = {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["qwen2.5"], "rag": TEMPLATES["oddments"]}
    path = saved(tmp_path, byte_level_original("gpt-2"), chat_template=sources, **names)
    theirs = by_transformers(path)
    templates = load_chat_templates(path, load_tokenizer(path).special_tokens)
    assert sorted(templates.names) == sorted(sources)
    for conversation in ("one question", "tools"):
        options = dict(CONVERSATIONS[conversation])
        messages, tools = options.pop("messages"), options.pop("tools", None)
        for name in (None, "rag"):
            expected = theirs.apply_chat_template(
                messages, tools=tools, chat_template=name, tokenize=False, add_generation_prompt=True
            )
            template = templates.select(name, with_tools=tools is not None)
            assert template.render(messages, tools=tools) == expected
