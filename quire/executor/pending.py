"""A plan under way, and its results as the engine wants them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from quire.core.plan import StepPlan, StepResult, TokenLogprobs
from quire.executor.batch import Launch, num_groups, sampled_rows
from quire.executor.buckets import GROUP_SIZE, Bucket
from quire.executor.sampler import NOT_NUMBERS, NOTHING_LEFT, Features, Sampled

WHY = {
    NOT_NUMBERS: "the model's logits are not finite",
    NOTHING_LEFT: "no token can be sampled: mask, biases, min_tokens and penalties leave none with a finite logit",
}


class Wanted(NamedTuple):
    """The log-probabilities a chunk asks for: how many of the most likely tokens, None for none at all."""

    logprobs: int | None
    prompt_logprobs: int | None
    num_prompt: int


@dataclass(slots=True)
class Launched:
    launch: Launch
    bucket: Bucket
    features: Features
    logits: jax.Array | None  # until it samples
    scored: Sampled | None  # for each token of the groups
    sampled: Sampled | None = None


Sampler = Callable[[StepPlan, Launched, dict[int, bytes]], None]


class Pending:
    """Implements the engine's Pending; `result` is the only place where the host waits for the device."""

    def __init__(self, plan: StepPlan, wanted: dict[int, Wanted], sample: Sampler) -> None:
        """`wanted` has the chunks, by their index, that ask for log-probabilities."""
        self.launched: list[Launched] = []
        self._plan = plan
        self._wanted = wanted
        self._sample = sample

    def sample(self, masks: dict[int, bytes]) -> None:
        for launched in self.launched:
            self._sample(self._plan, launched, masks)

    @property
    def is_done(self) -> bool:
        """Whether `result` would return without waiting for the device."""
        arrays = jax.tree.leaves([(launched.sampled, launched.scored) for launched in self.launched])
        return all(launched.sampled is not None for launched in self.launched) and all(a.is_ready() for a in arrays)

    def result(self) -> StepResult:
        chunks = self._plan.chunks
        tokens: list[list[int]] = [[] for _ in chunks]
        missing = False  # a token that could not be sampled
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for launched in self.launched:
            launch, samples = launched.launch, launched.sampled
            assert samples is not None, "it is collected once it samples"
            drawn = np.atleast_2d(np.asarray(samples.tokens))
            missing |= bool(drawn.min() < 0)
            count, by_row = len(drawn), drawn.T.tolist()
            for row, index in sampled_rows(chunks, launch, launched.bucket):
                tokens[index] += by_row[row] if count == 1 else by_row[row][: chunks[index].length]
                if index in self._wanted and chunks[index].samples:
                    top = self._wanted[index].logprobs
                    if top is not None:
                        logprobs.setdefault(index, []).append(_logprobs(samples, row, top))
            if launched.scored is not None:
                self._read_scores(launch, launched.scored, prompt_logprobs)
        failed = {}
        if missing:
            for index, chunk in enumerate(chunks):
                reason = min(0, *tokens[index])
                # Also where nothing is sampled: pages that hold NaN must not be shared.
                if reason == NOT_NUMBERS or (reason < 0 and chunk.samples):
                    end = next(n for n, token in enumerate(tokens[index]) if token < 0)
                    failed[index] = WHY[tokens[index][end]]
                    del tokens[index][end:]
        sampled = [tokens[index] for index, chunk in enumerate(chunks) if chunk.samples]
        return StepResult(self._plan.step, sampled, logprobs, prompt_logprobs, failed)

    def _read_scores(self, launch: Launch, scored: Sampled, into: dict[int, list[TokenLogprobs]]) -> None:
        first = 0
        for index in launch.fills:
            chunk, wanted = self._plan.chunks[index], self._wanted[index]
            assert wanted.prompt_logprobs is not None
            count = min(chunk.start + chunk.length, wanted.num_prompt - 1) - chunk.start
            into[index] = [_logprobs(scored, first + row, wanted.prompt_logprobs) for row in range(count)]
            first += num_groups(chunk) * GROUP_SIZE


def _logprobs(sampled: Sampled, row: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(
        float(np.asarray(sampled.logprobs)[row]),
        tuple(np.asarray(sampled.top_ids)[row, :top].tolist()),
        tuple(np.asarray(sampled.top_logprobs)[row, :top].tolist()),
    )
