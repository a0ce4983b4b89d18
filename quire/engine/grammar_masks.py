"""Token masks for sequences whose answers a grammar restricts."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from quire.core.limits import SoFar
from quire.core.plan import Failure, StepPlan, Update
from quire.errors import InvalidRequest, RequestFailed
from quire.request import Grammar, Request

MASKS_WITHIN_S = 0.5  # for one step; a mask takes a fraction of a millisecond, unless its grammar is hostile


class Matcher(Protocol):
    """The state of one answer in its grammar."""

    def advance(self, tokens: Sequence[int]) -> "Future[bytes]":
        """Follow `tokens`, on another thread. The result is the mask of the tokens that may come next: one bit each,
        in little-endian words of 32. Not called again before the result is there."""


class Grammars(Protocol):
    """Makes matchers. Any thread may use it."""

    def prepare(self, grammar: Grammar) -> "Future[None] | None":
        """Compile `grammar` on another thread; None if that is done. Does not report whether it worked."""

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of an answer. Compiles the grammar if that is not done; raises InvalidRequest."""


class NoGrammars:
    """The grammars of an engine without a tokenizer."""

    def prepare(self, grammar: Grammar) -> None:
        return None

    def matcher(self, grammar: Grammar) -> Matcher:
        raise InvalidRequest("grammar is set; the model has no tokenizer, so it cannot be followed")


class GrammarMasks:
    """Makes the masks of guided chunks.

    Each live sample of a request with a grammar has a matcher, which has seen every token of the sample that the host
    has. Its mask is computed on other threads as soon as the last of them is known, while the device computes the
    logits. Owned by the engine thread.
    """

    def __init__(self, grammars: Grammars, clock: Callable[[], float]) -> None:
        self._grammars = grammars
        self._clock = clock
        self._matchers: dict[int, dict[int, tuple[Matcher, Future[bytes]]]] = {}  # by request, by sample

    def prepare(self, request: Request) -> "Future[None] | None":
        """Compile the grammar of `request` on another thread; None if there is nothing to wait for."""
        return None if request.grammar is None else self._grammars.prepare(request.grammar)

    def matchers(self, request: Request, so_far: SoFar) -> dict[int, Matcher]:
        """By sample that is not finished. Raises InvalidRequest if the grammar is wrong."""
        grammar = request.grammar
        if grammar is None:
            return {}
        return {sample: self._grammars.matcher(grammar) for sample, tokens in enumerate(so_far) if tokens is not None}

    def begin(self, request: Request, so_far: SoFar, matchers: dict[int, Matcher]) -> None:
        if matchers:
            self._matchers[request.request_id] = {
                sample: (matcher, matcher.advance(so_far[sample] or ())) for sample, matcher in matchers.items()
            }

    def advance(self, updates: Iterable[Update]) -> None:
        """Follow the tokens of a step."""
        if not self._matchers:
            return
        for update in updates:
            matchers = self._matchers.get(update.request_id)
            if matchers is None:
                continue
            if update.finish is not None:
                del matchers[update.sample]
            elif update.tokens:
                matcher, _ = matchers[update.sample]
                matchers[update.sample] = matcher, matcher.advance(update.tokens)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._matchers.pop(request_id, None)

    def masks(self, plan: StepPlan) -> tuple[dict[int, bytes], list[Failure]]:
        """By index of the guided chunks of `plan`, and the requests for which there is none.

        Called when the results of all steps before it are known. A sequence that has ended meanwhile has no mask: its
        tokens are dropped.
        """
        until_s = self._clock() + MASKS_WITHIN_S
        masks: dict[int, bytes] = {}
        failures: dict[int, Failure] = {}
        for index in plan.guided:
            request_id = plan.chunks[index].request_id
            found = self._matchers.get(request_id, {}).get(plan.chunks[index].sample)
            if found is None:
                continue
            _, mask = found
            try:
                masks[index] = mask.result(max(0.0, until_s - self._clock()))
            except TimeoutError:
                reason = f"grammar is too complex: a token took longer than {MASKS_WITHIN_S:g} s"
                failures[request_id] = Failure(request_id, RequestFailed(reason))
            except Exception as error:  # of any kind; only this request is affected
                reason = f"grammar cannot be followed any further: {error}"
                failures[request_id] = Failure(request_id, RequestFailed(reason))
        return masks, list(failures.values())
