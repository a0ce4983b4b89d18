"""Offsets of the tokens of a text."""

import codecs
from collections.abc import Sequence

from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer


class TextOffsets:
    """The offsets of one text's tokens, in characters, as the tokens arrive. Owned by the request.

    Tokens that are parts of one character have the offset at which it begins. A token without text has the offset of
    what follows it. An offset does not depend on later tokens, so that streams can tell it at once: in a run of byte
    tokens, one broken byte of which makes all of them U+FFFD, the bytes before that one count as the characters that
    they would have been.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, begin: int = 0, skip_special_tokens: bool = True, continues: bool = True
    ) -> None:
        """`begin`: the offset of the first token. `continues`: text stands before it."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, continues=continues)
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._run = _Run() if tokenizer.text_rule.byte_fallback else None
        self._length = begin  # of the text that is certain

    @property
    def end(self) -> int:
        """The length of the text, if no token follows."""
        return self._length + (len(self._detokenizer.held_text) if self._run is None else self._run.length)

    def push(self, token: int) -> int:
        """The offset of the next token."""
        piece = self._pieces[token]
        begin, held = self._length, b""
        if isinstance(piece, bytes) and self._run is None:
            held = self._detokenizer.held  # at most three bytes
        text = self._detokenizer.push_one(token)
        self._length += len(text)
        if piece is None:
            return begin if self._run is None else begin + self._run.num_characters
        if isinstance(piece, str):
            self._run = self._run and _Run()
            return max(begin, self._length - len(piece))  # after what was held back; a stripped space has no length
        if self._run is not None:
            return begin + self._run.push(piece)
        return begin if _continues(held, piece) else begin + 1


class _Run:
    """A run of byte tokens, whose text is certain at its end."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._num_bytes = 0
        self._is_broken = False
        self.num_characters = 0  # that are complete

    @property
    def length(self) -> int:
        """Its characters if it ends here: one that is not complete breaks all of it."""
        return self._num_bytes if self._decoder.getstate()[0] else self.num_characters

    def push(self, byte: bytes) -> int:
        """The characters before the one that `byte` is a part of."""
        begin = self.num_characters
        try:
            self.num_characters += 0 if self._is_broken else len(self._decoder.decode(byte))
        except UnicodeDecodeError:
            self._is_broken = True
            begin = self._num_bytes
        self._num_bytes += 1
        if self._is_broken:  # every byte is a character
            self.num_characters = self._num_bytes
        return begin


def _continues(held: bytes, piece: bytes) -> bool:
    """True if `piece` begins with more of the character that `held` begins, or follows nothing."""
    try:
        codecs.utf_8_decode(held + piece[:1], "strict", False)
    except UnicodeDecodeError:
        return not held
    return True


def prompt_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """The offsets of a prompt's tokens in its text. Special tokens that the vocabulary adds are not in it."""
    offsets = TextOffsets(tokenizer, skip_special_tokens=False, continues=False)
    found: list[int] = []
    for token in tokens:
        is_absent = tokenizer.is_special(token) and not text.startswith(_shown(tokenizer, token), offsets.end)
        found.append(offsets.end if is_absent else offsets.push(token))
    if offsets.end == len(text):
        return found
    return _span_offsets(tokenizer, tokens, text) or [min(offset, len(text)) for offset in found]


def _shown(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode(errors="replace")


def _span_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """The same where the vocabulary changes texts before it splits them, so that tokens do not add up to the text.

    Empty if the tokens are not those of the text.
    """
    spans = tokenizer.encode_with_spans(text)
    if [span.id for span in spans] != list(tokens):
        return []
    found: list[int] = []
    begin = end = 0
    for token, _, start, stop in spans:
        piece = tokenizer.pieces(False)[token]
        if isinstance(piece, str):  # vocabularies may leave spaces out of spans
            with_spaces = start - len(piece) + len(piece.lstrip())
            start = with_spaces if text.startswith(piece, max(0, with_spaces)) else start
        begin = max(begin, end if start == stop else start)
        end = max(end, stop)
        found.append(begin)
    return found
