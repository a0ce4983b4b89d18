"""The sequences whose answers a grammar guides."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from quire.core.limits import SoFar
from quire.core.plan import Failure, StepPlan, Update
from quire.core.scheduler import Scheduler
from quire.errors import InvalidRequest, RequestFailed
from quire.request import Grammar, Request

MASKS_WITHIN_S = 0.5  # of one step; a mask takes a fraction of a millisecond, unless its grammar is made to explode


class Matcher(Protocol):
    """How far one answer has got in its grammar."""

    def advance(self, tokens: Sequence[int]) -> "Future[bytes]":
        """Go on by these, beside the caller. What comes of it is the mask of the tokens that may follow: a bit for
        each, in little-endian words of 32. Not called again before that is there."""


class Grammars(Protocol):
    """Makes matchers. Any thread may use it."""

    def prepare(self, grammar: Grammar) -> "Future[None] | None":
        """Compile `grammar` beside the caller; None when it is at hand. Does not say whether that worked."""

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the beginning of an answer. Raises InvalidRequest; compiles the grammar now if it was not prepared."""


class NoGrammars:
    """Of an engine that knows no text."""

    def prepare(self, grammar: Grammar) -> None:
        return None

    def matcher(self, grammar: Grammar) -> Matcher:
        raise InvalidRequest("grammar is set; the model has no tokenizer, so it cannot be followed")


class GrammarMasks:
    """Masks for the steps of guided sequences.

    There is a matcher for each live sample of a request with a grammar, and it has seen every token of the sample that
    the host has. Its mask is computed on other threads as soon as the last of them is known, while the device computes
    the logits that it is for. Owned by the engine thread.
    """

    def __init__(self, grammars: Grammars, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._grammars = grammars
        self._scheduler = scheduler
        self._clock = clock
        self._guides: dict[int, dict[int, tuple[Matcher, Future[bytes]]]] = {}  # by request, by sample

    def __len__(self) -> int:
        """Requests that are guided."""
        return len(self._guides)

    def prepare(self, request: Request) -> "Future[None] | None":
        """Compile what `request` needs beside the engine; None when there is nothing to wait for."""
        return None if request.grammar is None else self._grammars.prepare(request.grammar)

    def matchers(self, request: Request, so_far: SoFar) -> dict[int, Matcher]:
        """By sample that is to go on. Raises InvalidRequest when the grammar is wrong."""
        grammar = request.grammar
        if grammar is None:
            return {}
        return {sample: self._grammars.matcher(grammar) for sample, tokens in enumerate(so_far) if tokens is not None}

    def begin(self, request: Request, so_far: SoFar, matchers: dict[int, Matcher]) -> None:
        if matchers:
            self._guides[request.request_id] = {
                sample: (matcher, matcher.advance(so_far[sample] or ())) for sample, matcher in matchers.items()
            }

    def take(self, updates: Iterable[Update]) -> None:
        """Follow what a step has sampled."""
        if not self._guides:
            return
        for update in updates:
            guides = self._guides.get(update.request_id)
            if guides is None:
                continue
            if update.finish is not None:
                del guides[update.sample]
            elif update.tokens:
                matcher, _ = guides[update.sample]
                guides[update.sample] = matcher, matcher.advance(update.tokens)

    def forget_ended(self) -> None:
        """Let go of the matchers of requests that have ended, in whichever way."""
        for request_id in [one for one in self._guides if not self._scheduler.has(one)]:
            del self._guides[request_id]

    def masks(self, plan: StepPlan) -> tuple[dict[int, bytes], list[Failure]]:
        """For the guided chunks of `plan`, once the results of all steps before it are in; and requests that there can
        be none for. A sequence that has ended meanwhile has none: what is sampled for it is dropped."""
        until_s = self._clock() + MASKS_WITHIN_S
        masks: dict[int, bytes] = {}
        failures: dict[int, Failure] = {}
        for index in plan.guided:
            request_id = plan.chunks[index].request_id
            guide = self._guides.get(request_id, {}).get(plan.chunks[index].sample)
            if guide is None:
                continue
            _, mask = guide
            try:
                masks[index] = mask.result(max(0.0, until_s - self._clock()))
            except TimeoutError:
                reason = f"grammar is too complex: a token took longer than {MASKS_WITHIN_S:g} s"
                failures[request_id] = Failure(request_id, RequestFailed(reason))
            except Exception as error:  # whatever it is, it is this request's alone
                reason = f"grammar cannot be followed any further: {error}"
                failures[request_id] = Failure(request_id, RequestFailed(reason))
        return masks, list(failures.values())
