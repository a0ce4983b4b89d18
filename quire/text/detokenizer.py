"""Converts tokens to text as they arrive."""

import codecs
from collections.abc import Iterable

from quire.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one request's tokens, piece by piece. Owned by the request.

    The pieces, put together, are what `Tokenizer.decode` makes of all the tokens, and every piece is whole characters:
    bytes wait until the bytes that complete them, or show them to be broken, have come. In a vocabulary with byte
    fallback a run of byte tokens waits for its end, since one broken byte makes every byte of its run U+FFFD.

    Each token costs a table look-up; nothing is decoded twice.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False) -> None:
        """`continues`: text stands before the first token, so that a space it begins with is kept."""
        rule = tokenizer.text_rule
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._holds_runs = rule.byte_fallback
        self._held = bytearray()
        self._tokenizer = tokenizer
        self._first_differs = bool(rule.dropped_in_first_token) and not continues
        self._prefix = rule.stripped_prefix
        self._num_strippable = 0 if continues else rule.stripped_count

    @property
    def held(self) -> bytes:
        """The bytes that wait for others."""
        return bytes(self._held)

    @property
    def held_text(self) -> str:
        """Their text if none follow."""
        return self._text_of(bytes(self._held)) if self._held else ""

    @property
    def num_held(self) -> int:
        """The number of characters that they are, or begin."""
        text, num_used = codecs.utf_8_decode(self._held, "replace", False)
        return len(text) + (num_used < len(self._held))

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete. An id that the vocabulary does not name has no text."""
        pieces = self._pieces
        texts: list[str] = []
        for token_id in token_ids:
            piece = pieces[token_id]
            if isinstance(piece, str):
                if self._held:
                    texts.append(self._close())
                if self._first_differs:
                    piece = self._first(token_id)
                texts.append(piece)
            elif piece is not None:
                texts.append(self._hold(piece))
        text = "".join(texts)
        if self._num_strippable and text:
            text = self._strip(text)
        return text

    def push_one(self, token_id: int) -> str:
        """Like `push`, for one token. This runs for every token, and most are plain text."""
        piece = self._pieces[token_id]
        if piece.__class__ is str and not (self._held or self._first_differs or self._num_strippable):
            return piece
        return self.push((token_id,))

    def flush(self) -> str:
        """The text that is still held back, once no token follows. A character that was never completed is U+FFFD."""
        text = self._close()
        return self._strip(text) if self._num_strippable else text

    def _hold(self, piece: bytes) -> str:
        self._held += piece
        if self._holds_runs:
            return ""
        text, num_used = codecs.utf_8_decode(self._held, "replace", False)
        del self._held[:num_used]
        return text

    def _close(self) -> str:
        held = bytes(self._held)
        self._held.clear()
        return self._text_of(held)

    def _text_of(self, held: bytes) -> str:
        if not self._holds_runs:
            return held.decode(errors="replace")
        try:
            return held.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(held)

    def _first(self, token_id: int) -> str:
        self._first_differs = False
        piece = self._tokenizer.first_piece(token_id)
        assert isinstance(piece, str), "a rule that treats the first token apart has no byte tokens"
        return piece

    def _strip(self, text: str) -> str:
        """Remove the prefix that the rule strips from the start of the whole text."""
        while self._num_strippable and text:
            if not text.startswith(self._prefix):
                self._num_strippable = 0
                break
            text = text[len(self._prefix) :]
            self._num_strippable -= 1
        return text
