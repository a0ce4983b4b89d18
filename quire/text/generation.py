"""Converts generated tokens to text: the text of each token, stop strings, and the end of a sample."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from quire.request import FinishReason
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer

_new_tuple = tuple.__new__


class StopSearch(Protocol):
    """Looks for the stop strings of one sample."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now that `text` follows, and the stop string that was found."""

    def flush(self) -> tuple[str, str | None]:
        """The same, at the end of the text."""


class TextStep(NamedTuple):
    """A token and the text that it releases. The last step of a sample has the reason, and may have no token."""

    text: str
    token: int | None
    finish: FinishReason | None


class Generation:
    """One sample: its tokens so far, and their text as they arrive.

    The text does not depend on how tokens are grouped into pushes. Tokens after the one that completes a stop string
    are dropped. The token that ends a sample is not part of its text, unless `shows_stop_token`.
    """

    __slots__ = (
        "_detokenizer",
        "_length_first",
        "_min_tokens",
        "_num_unsearched",
        "_shows_stop_token",
        "_stops",
        "finish",
        "num_pushes",
        "stop",
        "text_of",
        "tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: StopSearch | None = None,
        *,
        skip_special_tokens: bool = True,
        continues: bool = True,
        shows_stop_token: bool = False,
        length_first: int | None = None,
        min_tokens: int = 0,
    ) -> None:
        """Without a tokenizer every text is empty. `continues`: text stands before the first token.

        `length_first`: with this many tokens the reason is the length, and stop strings are not looked for.
        `min_tokens`: nor are they in the text of the first so many tokens.
        """
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.stop: str | None = None  # the stop string that ended it
        self.num_pushes = 0  # that brought tokens
        self.text_of: Callable[[int], str] = lambda token: ""  # of the next token
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, continues=continues)
            self.text_of = self._detokenizer.push_one
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_unsearched = 0  # characters that the first `min_tokens` tokens begin, and later ones complete
        self._shows_stop_token = shows_stop_token
        self._length_first = length_first

    def push(self, tokens: Sequence[int], finish: FinishReason | None) -> list[TextStep]:
        """A step for each token, and one without a token where the sample ends by itself. None after the end."""
        if self.finish is not None:
            return []
        self.num_pushes += bool(tokens)
        steps: list[TextStep] = []
        last = len(tokens) - 1
        is_plain, text_of, stops = finish is None and self._length_first is None, self.text_of, self._stops
        search = None if stops is None else self._search_later if self._min_tokens else stops.push
        for position, token in enumerate(tokens):
            self.tokens.append(token)
            if is_plain:  # most tokens take this way
                text, stop = (text_of(token), None) if search is None else search(text_of(token))
                if stop is not None:
                    self.finish, self.stop = FinishReason.STOP_STRING, stop
                steps.append(_new_tuple(TextStep, (text, token, self.finish)))
            else:
                steps.append(self._step(token, finish if position == last else None))
            if self.finish is not None:
                return steps
        if finish is not None:
            steps.append(self._step(None, finish))
        return steps

    def _step(self, token: int | None, finish: FinishReason | None) -> TextStep:
        is_at_limit = self._length_first is not None and len(self.tokens) >= self._length_first
        if is_at_limit and finish is not None:
            finish = FinishReason.LENGTH
        is_hidden = finish is FinishReason.END or (finish is FinishReason.STOP_TOKEN and not self._shows_stop_token)
        text = "" if token is None or is_hidden else self.text_of(token)
        if finish is not None and self._detokenizer is not None:
            text += self._detokenizer.flush()
        if self._stops is not None and not is_at_limit:
            text, stop = self._search_later(text) if self._min_tokens else self._stops.push(text)
            if stop is None and finish is not None:
                rest, stop = self._stops.flush()
                text += rest
            if stop is not None:
                finish, self.stop = FinishReason.STOP_STRING, stop
        self.finish = finish
        return TextStep(text, token, finish)

    def _search_later(self, text: str) -> tuple[str, str | None]:
        """Like `StopSearch.push`, for the part of `text` that is not of the first `min_tokens` tokens."""
        assert self._stops is not None
        if len(self.tokens) <= self._min_tokens:
            if len(self.tokens) == self._min_tokens and self._detokenizer is not None:
                self._num_unsearched = self._detokenizer.num_held
            return text, None
        unsearched = text[: self._num_unsearched]
        self._num_unsearched -= len(unsearched)
        shown, stop = self._stops.push(text[len(unsearched) :])
        return unsearched + shown, stop
