"""Enforces a thinking budget token by token."""

from collections.abc import Sequence

from quire.request import ThinkingBudget
from quire.text.detokenizer import Detokenizer
from quire.text.thinking import ThinkingFormat, ThinkingParser
from quire.text.tokenizer import Tokenizer


class ThinkingLimit:
    """Counts the tokens of an answer's thinking section. Once they are as many as may be, the last mark is forced.

    An incomplete character is finished first, which takes at most three tokens.
    """

    def __init__(self, tokenizer: Tokenizer, budget: ThinkingBudget) -> None:
        self._text_of = Detokenizer(tokenizer, skip_special_tokens=False, continues=True).push_one
        self._parser = ThinkingParser(ThinkingFormat(budget.begin, budget.end), begins_inside=budget.is_opened)
        self._end = tokenizer.encode(budget.end, add_special_tokens=False)
        self._num_left = budget.max_tokens
        self._num_forced = 0  # tokens of the last mark that have come

    def limited(self, mask: bytes, tokens: Sequence[int]) -> bytes:
        """The mask after `tokens`, which follow those before; `mask` is that of the grammar."""
        parser = self._parser
        for token in tokens:
            was_thinking = parser.is_thinking
            parser.push(self._text_of(token))
            if not was_thinking:
                continue
            if self._num_left <= 0:
                self._num_forced = self._num_forced + 1 if token == self._end[self._num_forced] else 0
            elif parser.is_thinking:
                self._num_left -= 1
        if self._num_left > 0 or not parser.is_thinking:
            return mask
        byte, bit = divmod(self._end[self._num_forced], 8)
        if not mask[byte] >> bit & 1:
            return mask
        forced = bytearray(len(mask))
        forced[byte] = 1 << bit
        return bytes(forced)
