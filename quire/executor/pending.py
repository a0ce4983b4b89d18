"""A plan under way, and its results as the engine wants them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from quire.core.plan import NO_TOKEN_LEFT, Chunk, SlotStart, StepPlan, StepResult, TokenLogprobs
from quire.executor.launch import Launch
from quire.executor.sample.sampler import NOT_NUMBERS, NOTHING_LEFT, Features, Sampled, features_of
from quire.executor.slots import NO_TOKEN
from quire.executor.step import Computed

WHY = {
    NOT_NUMBERS: "the model's logits are not finite: it computed NaN or infinity for this request",
    NOTHING_LEFT: NO_TOKEN_LEFT,
}


class Extras(NamedTuple):
    """A request's wishes beside tokens that are drawn by temperature alone."""

    features: Features
    logprobs: int | None  # with so many of the most likely tokens; None: no log-probabilities
    prompt_logprobs: int | None
    num_prompt: int

    def scores(self, chunk: Chunk) -> bool:
        """True if tokens of the prompt follow on those of the chunk, and their log-probabilities are asked for."""
        return self.prompt_logprobs is not None and chunk.start < self.num_prompt - 1


def extras_of(start: SlotStart) -> Extras | None:
    """None where a request asks for tokens alone."""
    features = features_of(start)
    if not any(features) and start.prompt_logprobs is None:
        return None
    return Extras(features, start.sampling.logprobs, start.prompt_logprobs, len(start.prompt))


@dataclass(slots=True)
class Launched:
    launch: Launch
    features: Features
    computed: Computed | None = None  # None where one program computed and sampled
    sampled: Sampled | None = None  # of the chunks that sample; None before, and where none does
    has_all_rows: bool = False  # whether `sampled` has an entry for every chunk, also those that do not sample

    @property
    def chunks(self) -> list[int]:
        """By index, the chunk of each entry of `sampled`."""
        return self.launch.indices.tolist() if self.has_all_rows else self.launch.sampled


Sampler = Callable[[Launched, dict[int, bytes]], None]


class Copied(Protocol):
    """Pages on their way between the device and the host."""

    def result(self) -> object:
        """Wait until they are there."""


class Pending:
    """Implements the engine's Pending; `result` is the only place where the host waits for the device."""

    def __init__(
        self,
        plan: StepPlan,
        extras: dict[int, Extras],
        copied: Sequence[Copied],
        sample: Sampler,
        take_lost: Callable[[], Sequence[int]],
    ) -> None:
        """`extras`: by index, what chunks ask for beside tokens. `take_lost` gives the pages of the host whose copies
        have failed since it was called last."""
        self.launched: list[Launched] = []
        self._plan = plan
        self._extras = extras
        self._copied = copied
        self._sample = sample
        self._take_lost = take_lost

    def sample(self, masks: dict[int, bytes]) -> None:
        for launched in self.launched:
            self._sample(launched, masks)

    def result(self) -> StepResult:
        chunks = self._plan.chunks
        tokens: list[list[int]] = [[] for _ in chunks]
        is_any_missing = False  # a token that could not be sampled
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for launched in self.launched:
            indices, sampled = launched.chunks, launched.sampled
            assert sampled is not None or not indices, "a step is collected once it samples"
            if sampled is not None:
                drawn = np.atleast_2d(np.asarray(sampled.tokens))
                is_any_missing |= bool(drawn.min() < 0)
                count, by_row = len(drawn), drawn.T.tolist()
                for row, index in enumerate(indices):
                    if by_row[row][0] == NO_TOKEN:
                        continue  # after a wrong guess
                    tokens[index] += by_row[row] if count == 1 else by_row[row][: chunks[index].length]
                    if index in self._extras and chunks[index].samples:
                        top = self._extras[index].logprobs
                        if top is not None:
                            logprobs.setdefault(index, []).append(_logprobs(sampled, row, top))
            is_any_missing |= self._mark_not_finite(launched, len(indices), tokens)
            if launched.computed is not None and launched.computed.scored is not None:
                self._read_scores(launched.launch, launched.computed.scored, prompt_logprobs)
        failed = self._failures(tokens) if is_any_missing else {}
        waited_s = self._wait_for_copies()
        sampled_tokens = [tokens[index] for index, chunk in enumerate(chunks) if chunk.samples]
        lost = tuple(self._take_lost())
        return StepResult(self._plan.step, sampled_tokens, logprobs, prompt_logprobs, failed, lost, waited_s)

    def _wait_for_copies(self) -> float:
        """Returns the seconds that it took."""
        if not self._copied:
            return 0.0
        started_s = time.monotonic()
        for copied in self._copied:
            copied.result()
        return time.monotonic() - started_s

    def _mark_not_finite(self, launched: Launched, num_sampled: int, tokens: list[list[int]]) -> bool:
        """Chunks that do not sample fail too where their numbers are not finite: their pages must not be shared."""
        if launched.computed is None:
            return False
        others = launched.launch.unsampled
        if not others:  # then no copy of this is on its way, and to wait for one takes a millisecond
            return False
        is_finite = np.asarray(launched.computed.is_finite)[num_sampled:]
        not_finite = [index for index, finite in zip(others, is_finite, strict=False) if not finite]
        for index in not_finite:
            tokens[index].append(NOT_NUMBERS)
        return bool(not_finite)

    def _failures(self, tokens: list[list[int]]) -> dict[int, str]:
        """Failures by index of the chunk. Its tokens are cut before the first that is missing."""
        failed = {}
        for index, chunk in enumerate(self._plan.chunks):
            reason = min(tokens[index], default=0)
            if reason == NOT_NUMBERS or (reason < 0 and chunk.samples):
                end = next(n for n, token in enumerate(tokens[index]) if token < 0)
                failed[index] = WHY[tokens[index][end]]
                del tokens[index][end:]
        return failed

    def _read_scores(self, launch: Launch, scored: Sampled, into: dict[int, list[TokenLogprobs]]) -> None:
        first = 0
        for index in launch.indices.tolist():
            chunk, extras = self._plan.chunks[index], self._extras[index]
            assert extras.prompt_logprobs is not None
            count = min(chunk.start + chunk.length, extras.num_prompt - 1) - chunk.start
            into[index] = [_logprobs(scored, first + row, extras.prompt_logprobs) for row in range(count)]
            first += chunk.length


def _logprobs(sampled: Sampled, row: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(
        float(np.asarray(sampled.logprobs)[row]),
        tuple(np.asarray(sampled.top_ids)[row, :top].tolist()),
        tuple(np.asarray(sampled.top_logprobs)[row, :top].tolist()),
    )
