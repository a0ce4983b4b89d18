"""What comes back: completions, and the pieces they arrive in."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.messages import TokenLogprobs, Update
from quire.errors import InvalidRequest, QuireError
from quire.request import FinishReason
from quire.text.detokenizer import Detokenizer
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer

STOP_STRING, ERROR = "stop_string", "error"


@dataclass
class Completion:
    """One continuation of a prompt.

    `error` is set, and `finish_reason` is "error", when this prompt could not be completed; text and tokens are then
    what there was before. Where a stop string ended it, `text` ends before the string, and `token_ids` has the tokens
    that spell it.
    """

    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None  # end, stop_token, stop_string, length, error
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids
    prompt_logprobs: list[TokenLogprobs] | None = None  # one for each of the prompt's tokens after the first
    error: QuireError | None = None


@dataclass(frozen=True)
class Delta:
    """What one step added to a completion."""

    index: int  # of the prompt
    sample: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None = None


class Answer:
    """A completion in the making."""

    def __init__(
        self, prompt_ids: tuple[int, ...], tokenizer: Tokenizer | None, stop: Sequence[str], continues: bool
    ) -> None:
        """`continues` where the answer goes on in the middle of the prompt's text, as opposed to a chat's."""
        if stop and tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and the model has none")
        self.completion = Completion(prompt_ids)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, continues=continues)
        self._stops = StopStrings(list(stop)) if stop else None

    @property
    def is_done(self) -> bool:
        return self.completion.finish_reason is not None

    def take(self, update: Update) -> str:
        """Add what a step brought; returns the new text that is safe to show."""
        done = self.completion
        done.token_ids += update.tokens
        done.cached_tokens = update.cached_tokens
        if update.logprobs is not None:
            done.logprobs = (done.logprobs or []) + update.logprobs
        if update.prompt_logprobs is not None:
            done.prompt_logprobs = (done.prompt_logprobs or []) + update.prompt_logprobs
        text = self._text(update)
        done.text += text
        if done.finish_reason is None and update.finish is not None:
            done.finish_reason = str(update.finish)
        return text

    def fail(self, error: QuireError) -> None:
        self.completion.error = error
        self.completion.finish_reason = ERROR

    def _text(self, update: Update) -> str:
        if self._detokenizer is None:
            return ""
        shown = update.tokens[:-1] if update.finish is FinishReason.STOP_TOKEN else update.tokens
        text = self._detokenizer.push(shown)
        if update.finish is not None:
            text += self._detokenizer.flush()
        if self._stops is None:
            return text
        released = self._stops.push(text).text
        if update.finish is not None:
            released += self._stops.flush().text
        if self._stops.found is not None:
            self.completion.finish_reason = STOP_STRING
        return released
