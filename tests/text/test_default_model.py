"""The default model's own tokenizer and chat template, against golden output of transformers."""

import json
from pathlib import Path

import pytest

from quire.files.model_files import locate
from quire.text.chat import load_chat_templates
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.conversations import CONVERSATIONS
from tests.text.default_model import DEFAULT_GOLDEN
from tests.text.token_ids import named_id

GOLDEN = json.loads(DEFAULT_GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def path() -> Path:
    found = locate("default").tokenizer
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(path)


def test_the_corpus_is_encoded_and_decoded_as_by_transformers(tokenizer: Tokenizer) -> None:
    for text, ids, decoded in zip(GOLDEN["texts"], GOLDEN["encoded"], GOLDEN["decoded"], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == decoded, text
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        assert "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush() == decoded, text


def test_a_conversation_is_rendered_as_by_transformers_and_its_turns_become_special_tokens(
    path: Path, tokenizer: Tokenizer
) -> None:
    template = load_chat_templates(path, tokenizer.special_tokens).select()
    prompt = template.render(CONVERSATIONS["several turns"]["messages"])
    assert prompt == GOLDEN["prompt"]
    ids = tokenizer.encode(prompt)
    assert (ids[0], ids.count(named_id(tokenizer, "eos_token") or -1)) == (named_id(tokenizer, "bos_token"), 4)


def test_digits_are_tokens_of_their_own_in_every_script(tokenizer: Tokenizer) -> None:
    for text in ("x ½", "x 7", "x ٣"):
        assert tokenizer.piece(tokenizer.encode(text)[1]) == "Ġ"
