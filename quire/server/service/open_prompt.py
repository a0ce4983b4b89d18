"""A prompt that the engine works on, and the deltas of its answers."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from quire.errors import DeadlineExceeded, queue_limit, time_limit
from quire.ipc.messages import Account, BegunWith, Submit, TokenLogprobs, Update
from quire.request import FinishReason, Request
from quire.server.service.generation_spec import GenerationSpec
from quire.text.generation import Generation
from quire.text.tokenizer import Tokenizer

_new_tuple = tuple.__new__


class TokenDelta(NamedTuple):
    """One token of one sample, and the text it releases. The last of a sample may have no token."""

    prompt: int  # number among the request's prompts
    sample: int
    text: str
    token: int | None
    logprobs: TokenLogprobs | None
    finish: FinishReason | None


class OpenPrompt:
    """Turns the engine's updates of one prompt into deltas.

    It does not know its stream, which knows it: a reference cycle would keep both until the garbage collector runs.
    """

    def __init__(self, tokenizer: Tokenizer, index: int, spec: GenerationSpec, request: Request) -> None:
        self.request = request
        self.index = index
        self.cached_tokens = 0
        self.accounts: list[Account] = []  # the last of each engine, where timings are wanted
        self.logprobs: list[TokenLogprobs] = []  # of the prompt's own tokens after the first, where requested
        self.num_guesses = 0  # of its tokens
        self.right_guesses: Counter[int] = Counter()  # the number of steps by how many of their guesses were right
        self.samples = [
            Generation(
                tokenizer,
                spec.stop_search(spec.stop, spec.include_stop) if spec.stop else None,
                skip_special_tokens=spec.skip_special_tokens,
                shows_stop_token=spec.include_stop,
                length_first=request.max_tokens if spec.length_first else None,
                min_tokens=request.min_tokens,
            )
            for _ in range(request.samples)
        ]
        self.num_left = request.samples
        self.begun_with: BegunWith | None = None  # the adapter that an engine has accepted it with
        self.is_admitted = False  # an engine has accepted it
        self.has_started = False  # it has had a slot, so that it may wait for another one for any time
        self._is_plain = not spec.stop and request.prompt_logprobs is None
        self._is_with_another = False  # an engine that has sent no account yet

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def resumed(self, spent_s: float) -> Submit:
        """The command by which another engine continues, `spent_s` after the request's arrival."""
        self._is_with_another = True
        request = self.request
        if self.has_started:
            request = replace(request, queue_timeout_s=None)
        if request.prompt_logprobs is not None:
            if len(self.logprobs) == len(request.prompt) - 1:
                request = replace(request, prompt_logprobs=None)  # all of them have come
            else:
                self.logprobs.clear()
        folder = ""
        if self.begun_with is not None:
            request, folder = replace(request, adapter_digest=self.begun_with.digest), self.begun_with.folder
        so_far = [None if sample.finish is not None else sample.tokens for sample in self.samples]
        return Submit(request, so_far, spent_s, folder)

    def deadline_passed(self, spent_s: float) -> DeadlineExceeded | None:
        """The error of a request that no engine has, `spent_s` after its arrival; None while it may wait on."""
        request = self.request
        if request.timeout_s is not None and spent_s > request.timeout_s:
            return DeadlineExceeded(f"{time_limit(request.timeout_s)} passed before the answer was complete")
        if request.queue_timeout_s is not None and spent_s > request.queue_timeout_s and not self.has_started:
            return DeadlineExceeded(f"{queue_limit(request.queue_timeout_s)} passed before the request could start")
        return None

    def note(self, account: Account) -> None:
        if self.accounts and not self._is_with_another:
            self.accounts.pop()
        self.accounts.append(account)
        self._is_with_another = False

    def apply(self, update: Update, pending: list[TokenDelta]) -> None:
        """Append the deltas of a step's tokens to `pending`."""
        _, number, tokens, finish, cached_tokens, logprobs, prompt_logprobs, guesses = update
        index, sample = self.index, self.samples[number]
        if guesses is not None:
            self.num_guesses += guesses.made
            self.right_guesses[guesses.right] += 1
        if finish is None and self._is_plain and logprobs is None and sample.tokens:  # most tokens take this way
            if sample.finish is None:
                sample.tokens += tokens
                sample.num_pushes += 1
                text_of = sample.text_of
                pending += [
                    _new_tuple(TokenDelta, (index, number, text_of(token), token, None, None)) for token in tokens
                ]
            return
        if number == 0 and not sample.tokens:  # the others, and another engine, share what the first computes
            self.cached_tokens = cached_tokens
        if prompt_logprobs and number == 0:
            self.logprobs += prompt_logprobs
        for position, (text, token, reason) in enumerate(sample.push(tokens, finish)):
            scored = None if logprobs is None or token is None else logprobs[position]
            pending.append(_new_tuple(TokenDelta, (index, number, text, token, scored, reason)))
            if reason is not None:
                self.num_left -= 1
