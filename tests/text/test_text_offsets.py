"""Offsets of tokens: in order, inside the text, and where the token's text stands."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from quire.text.detokenizer import Detokenizer
from quire.text.text_offsets import TextOffsets, prompt_offsets
from quire.text.tokenizer import Tokenizer
from tests.text.test_detokenizer import KINDS, kinds, token_streams
from tests.text.vocabularies import byte_fallback_tokenizer, byte_level_original


def check(tokenizer: Tokenizer, tokens: list[int], offsets: list[int], text: str, skip: bool) -> None:
    """A space that begins the first token may be missing in the text."""
    assert len(offsets) == len(tokens)
    assert all(before <= after for before, after in pairwise([0, *offsets, len(text)]))
    for token, offset in zip(tokens, offsets, strict=True):
        piece = tokenizer.pieces(skip)[token]
        if isinstance(piece, str):
            assert text.startswith(piece, offset) or (offset == 0 and text.startswith(piece.replace(" ", "", 1)))


@given(data=st.data(), kind=kinds, skip=st.booleans(), begin=st.integers(0, 3))
def test_offsets_of_any_tokens_are_in_order_and_where_their_text_is(
    data: st.DataObject, kind: str, skip: bool, begin: int
) -> None:
    tokenizer = KINDS[kind]()
    tokens = data.draw(token_streams(tokenizer))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, continues=True)
    text = "." * begin + detokenizer.push(tokens) + detokenizer.flush()
    offsets = TextOffsets(tokenizer, begin=begin, skip_special_tokens=skip)
    check(tokenizer, tokens, [offsets.push(token) for token in tokens], text, skip)
    assert offsets.end == len(text)


@given(kind=kinds, text=st.text(max_size=30))
def test_offsets_in_a_prompt_are_in_order_and_where_the_text_of_tokens_is(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer.encode(text)
    found = prompt_offsets(tokenizer, tokens, text)
    assert all(before <= after for before, after in pairwise([0, *found, len(text)]))
    if tokenizer.decode(tokens, skip_special_tokens=False) != text:  # unknown characters
        return
    check(tokenizer, tokens, found, text, False)
    for token, begin in zip(tokens, found, strict=True):
        piece = tokenizer.pieces(False)[token]
        if isinstance(piece, bytes):
            assert piece in text[begin:].encode()[: len(piece) + 3]


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback, unprefixed"])
def test_a_character_of_several_tokens(kind: str) -> None:
    tokenizer = KINDS[kind]()
    text = "👋🏽 a"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    found = prompt_offsets(tokenizer, tokens, text)
    assert sorted(set(found)) in ([0, 1, 2], [0, 1, 2, 3])
    assert len(tokens) > 4
    assert text[found[-1] :] in (" a", "a")


def test_broken_characters_count_as_they_are_shown() -> None:
    tokenizer = KINDS["byte fallback, unprefixed"]()
    byte = {value: tokenizer.id_of(f"<0x{value:02X}>") for value in (0xC3, 0xA9, 0xFF)}
    letter = tokenizer.id_of("a")
    tokens = [byte[0xC3], byte[0xA9], byte[0xC3], byte[0xFF], byte[0xA9], letter, byte[0xC3], letter]
    offsets = TextOffsets(tokenizer)
    assert tokenizer.decode(tokens) == "\ufffd" * 5 + "a\ufffda"
    # The first three bytes could still be é and the beginning of another character.
    assert [offsets.push(token) for token in tokens] == [0, 0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_special_tokens_that_the_vocabulary_adds_take_no_room(is_byte_level: bool) -> None:
    backend = byte_level_original("gpt-2") if is_byte_level else byte_fallback_tokenizer(True)
    backend = type(backend).from_str(backend.to_str())
    mark = "<|endoftext|>" if is_byte_level else "<s>"
    backend.add_special_tokens([mark])
    number = backend.token_to_id(mark)
    backend.post_processor = processors.TemplateProcessing(f"{mark} $A {mark}", special_tokens=[(mark, number)])
    tokenizer = Tokenizer(backend, {})
    for text in ("the é", f"{mark}the é"):
        tokens = tokenizer.encode(text)
        found = prompt_offsets(tokenizer, tokens, text)
        assert (tokens[0], tokens[-1]) == (number, number)
        assert (found[0], found[-1]) == (0, len(text))
        assert [text[offset] for offset in found[-3:-1]] in (["é", "é"], [" ", "é"])


def test_offsets_are_those_of_the_text_as_it_was_given_where_the_vocabulary_changes_it() -> None:
    backend = byte_level_original("gpt-2")
    backend = type(backend).from_str(backend.to_str())
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend, {})
    text = "e\u0301 the the"
    found = prompt_offsets(tokenizer, tokenizer.encode(text), text)
    assert found[0] == 0
    assert text[found[-1] :] in (" the", "the", "he", "e")
    assert all(before <= after for before, after in pairwise([*found, len(text)]))


@given(data=st.data(), kind=kinds, skip=st.booleans())
def test_the_end_is_known_after_every_token(data: st.DataObject, kind: str, skip: bool) -> None:
    tokenizer = KINDS[kind]()
    offsets = TextOffsets(tokenizer, skip_special_tokens=skip)
    tokens = data.draw(token_streams(tokenizer))
    for count, token in enumerate(tokens, 1):
        offsets.push(token)
        whole = Detokenizer(tokenizer, skip_special_tokens=skip, continues=True)
        assert offsets.end == len(whole.push(tokens[:count]) + whole.flush())
