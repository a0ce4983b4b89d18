"""Streaming text: pieces add up to the decode of all tokens, and no piece is ahead of what is certain."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer
from tests.text.corpus import TEXTS
from tests.text.vocabularies import byte_fallback_tokenizer, byte_level_original, metaspace_tokenizer

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": cache(lambda: Tokenizer(byte_level_original("gpt-2"), {})),
    "byte fallback, prefixed": cache(lambda: Tokenizer(byte_fallback_tokenizer(True), {})),
    "byte fallback, unprefixed": cache(lambda: Tokenizer(byte_fallback_tokenizer(False), {})),
    "metaspace, prefixed": cache(lambda: Tokenizer(metaspace_tokenizer(True), {})),
    "metaspace, unprefixed": cache(lambda: Tokenizer(metaspace_tokenizer(False), {})),
}
kinds = st.sampled_from(sorted(KINDS))


def stream(tokenizer: Tokenizer, batches: list[list[int]], *, skip: bool) -> tuple[list[str], str]:
    """The pieces of each batch, and what is left at the end."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    # One token takes a shorter way.
    pushed = [detokenizer.push_one(batch[0]) if len(batch) == 1 else detokenizer.push(batch) for batch in batches]
    return pushed, detokenizer.flush()


def token_streams(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, with the bytes (which make and break characters) and the special ones more often than by chance."""
    bytes_ = [
        token_id
        for token_id in range(tokenizer.vocab_size)
        if isinstance(tokenizer.pieces(False)[token_id], bytes) or tokenizer.piece(token_id) in {"▁", "Ġ", "<0x20>"}
    ]
    anything = st.integers(0, tokenizer.vocab_size - 1)
    some = [anything, st.sampled_from(sorted(tokenizer.special_ids))]
    return st.lists(st.one_of(*some, *([st.sampled_from(bytes_)] * 3 if bytes_ else [])), max_size=30)


@given(data=st.data(), kind=kinds, skip=st.booleans())
def test_pieces_of_any_tokens_add_up_to_their_decode_and_never_run_ahead_of_it(
    data: st.DataObject, kind: str, skip: bool
) -> None:
    tokenizer = KINDS[kind]()
    ids = data.draw(token_streams(tokenizer))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    pieces, rest = stream(tokenizer, [[token_id] for token_id in ids], skip=skip)
    assert "".join(pieces) + rest == whole
    # A piece that held half a character, or gave up on one too early, would not be a beginning of the whole.
    said = ""
    for piece in pieces:
        said += piece
        assert whole.startswith(said)


@given(data=st.data(), kind=kinds, text=st.text(max_size=30))
def test_text_comes_back_however_its_tokens_are_batched(data: st.DataObject, kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    batches = [ids[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    pieces, rest = stream(tokenizer, batches, skip=False)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_corpus_streams_as_it_decodes(kind: str) -> None:
    tokenizer = KINDS[kind]()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            pieces, rest = stream(tokenizer, [[token_id] for token_id in ids], skip=skip)
            assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=skip), text


@given(st.text(max_size=30))
def test_a_byte_level_character_is_out_as_soon_as_its_last_byte_is_in(text: str) -> None:
    tokenizer = KINDS["byte-level"]()
    detokenizer = Detokenizer(tokenizer)
    said = ""
    for index, byte in enumerate(text.encode()):
        said += detokenizer.push([byte_id(tokenizer, byte)])
        assert said == text.encode()[: index + 1].decode(errors="ignore")
    assert detokenizer.flush() == ""


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


def test_a_broken_character_is_replaced_where_it_stands() -> None:
    tokenizer = KINDS["byte-level"]()
    lead, letter = byte_id(tokenizer, 0xE4), byte_id(tokenizer, ord("a"))
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([lead]), detokenizer.push([letter]), detokenizer.push([lead])] == ["", "\ufffda", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_one_broken_byte_breaks_its_run_of_byte_tokens_and_no_other() -> None:
    tokenizer = KINDS["byte fallback, unprefixed"]()
    a = tokenizer.encode("a")
    smile = tokenizer.encode("😀")
    assert len(smile) == 4
    broken = tokenizer.id_of("<0xFF>")
    assert broken is not None
    pieces, rest = stream(tokenizer, [smile, a, [*smile, broken], a], skip=True)
    assert (pieces, rest) == (["", "😀a", "", "\ufffd" * 5 + "a"], "")


def test_the_space_before_the_first_word_is_dropped_at_the_start_of_a_text_alone() -> None:
    for kind in ("byte fallback, prefixed", "metaspace, prefixed"):
        tokenizer = KINDS[kind]()
        ids = tokenizer.encode("the the")
        fresh, continuing = Detokenizer(tokenizer), Detokenizer(tokenizer, continues=True)
        assert (fresh.push(ids), continuing.push(ids)) == ("the the", " the the")
        assert fresh.push(ids) == " the the"


def test_special_tokens_are_left_out_or_kept_as_asked() -> None:
    tokenizer = KINDS["byte-level"]()
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert stream(tokenizer, [ids], skip=True) == (["hi"], "")
    assert stream(tokenizer, [ids], skip=False) == (["<|im_start|>hi<|im_end|>"], "")


def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    # Models round their embedding up, so such an id can be sampled.
    tokenizer = KINDS["byte-level"]()
    a = tokenizer.encode("a")
    assert stream(tokenizer, [a, [tokenizer.vocab_size, tokenizer.vocab_size + 99], a], skip=True) == (
        ["a", "", "a"],
        "",
    )
