"""Completions, and the deltas that stream them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.errors import InvalidRequest, QuireError
from quire.ipc.messages import TokenLogprobs, Update
from quire.text.answer_parts import PLAIN, AnswerForm, AnswerParser, Reasoning
from quire.text.generation import Generation
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer

ERROR = "error"  # as a finish reason


@dataclass
class Completion:
    """One continuation of a prompt.

    `error` is set, and `finish_reason` is "error", when this prompt could not be completed; text and tokens are then
    what there was before. The thinking of a model in a chat is its `reasoning`, and not in `text`. Where
    a stop string ended it, `text` ends before the string, and `token_ids` has the tokens that spell it.
    """

    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None  # end, stop_token, stop_string, length, error
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    tokens_per_s: float | None = None  # after the first step with tokens; None if all came in one step
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids
    prompt_logprobs: list[TokenLogprobs] | None = None  # one for each of the prompt's tokens after the first
    error: QuireError | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids)


class Delta(msgspec.Struct, frozen=True):
    """One step of a completion. The numbers of tokens, and their speed, are of all steps so far."""

    index: int  # of the prompt
    sample: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    tokens_per_s: float | None
    reasoning: str = ""


class CompletionBuilder:
    """Builds a completion from the engine's updates."""

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        continues: bool,
        form: AnswerForm = PLAIN,
        clock: Callable[[], float] = time.monotonic,
        min_tokens: int = 0,
    ) -> None:
        """`continues` where the answer goes on in the middle of the prompt's text, as opposed to a chat's.

        `min_tokens`: stop strings are looked for after so many tokens.
        """
        if stop and tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and the model has none")
        self.completion = Completion(prompt_ids)
        shows_marks = tokenizer is not None and any(tokenizer.special_id(mark) is not None for mark in form.marks)
        stops = StopStrings(stop) if stop else None
        self._generation = Generation(
            tokenizer, stops, continues=continues, skip_special_tokens=not shows_marks, min_tokens=min_tokens
        )
        self._parser = AnswerParser(form)
        self.completion.token_ids = self._generation.tokens
        self._clock = clock
        self._first_s: float | None = None  # when the first tokens came
        self._num_first = 0

    @property
    def is_done(self) -> bool:
        return self.completion.finish_reason is not None

    def apply(self, index: int, update: Update) -> Delta:
        """Add a step's tokens to the completion, of prompt number `index`."""
        done = self.completion
        steps = self._generation.push(update.tokens, update.finish)
        tokens = [step.token for step in steps if step.token is not None]
        logprobs = None if update.logprobs is None else update.logprobs[: len(tokens)]
        pieces = self._parser.push("".join([step.text for step in steps]))
        if self._generation.finish is not None:
            pieces += self._parser.flush()
        text = "".join([piece for piece in pieces if isinstance(piece, str)])
        reasoning = "".join([piece.text for piece in pieces if isinstance(piece, Reasoning)])
        done.text += text
        done.reasoning += reasoning
        done.cached_tokens = update.cached_tokens
        if tokens:
            self._note_speed(len(tokens))
        if logprobs is not None:
            done.logprobs = (done.logprobs or []) + logprobs
        if update.prompt_logprobs is not None:
            done.prompt_logprobs = (done.prompt_logprobs or []) + update.prompt_logprobs
        if self._generation.finish is not None:
            done.finish_reason = str(self._generation.finish)
        return Delta(
            index,
            update.sample,
            text,
            tokens,
            done.finish_reason,
            logprobs,
            done.prompt_tokens,
            done.cached_tokens,
            done.generated_tokens,
            done.tokens_per_s,
            reasoning,
        )

    def _note_speed(self, num_new: int) -> None:
        now = self._clock()
        if self._first_s is None:
            self._first_s, self._num_first = now, num_new
        elif now > self._first_s:
            num_later = self.completion.generated_tokens - self._num_first
            self.completion.tokens_per_s = num_later / (now - self._first_s)

    def fail(self, error: QuireError) -> None:
        self.completion.error = error
        self.completion.finish_reason = ERROR
