"""Token masks for sequences with a grammar."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from quire.core.limits import SoFar
from quire.core.plan import Failure, StepPlan, Update
from quire.errors import InvalidRequest, RequestFailed
from quire.request import Grammar, Request

MASKS_WITHIN_S = 0.5  # for one step; a mask takes a fraction of a millisecond, unless its grammar is hostile


# The tokens that must come next, if a grammar leaves no choice; and a mask of those that may come after them: one bit
# each, in little-endian words of 32.
Ahead = tuple[list[int], bytes]


class Matcher(Protocol):
    """The state of one answer in its grammar."""

    def advance(self, tokens: Sequence[int]) -> "Future[Ahead]":
        """Follow `tokens`, which come after all that was forced, on another thread. Not called again before the result
        is there."""


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


class Guided:
    """One sample of a request with a grammar.

    Its matcher has seen every token of the sample that the host has, and `expected`, the forced tokens after them.
    """

    __slots__ = ("ahead", "expected", "matcher", "num_known")

    def __init__(self, matcher: Matcher, num_prompt: int, tokens: Sequence[int]) -> None:
        self.matcher = matcher
        self.num_known = num_prompt + len(tokens)
        self.expected: list[int] | None = None  # None: not known before `ahead` is
        self.ahead = matcher.advance(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """The next tokens of the sample."""
        self.num_known += len(tokens)
        expected = self.expected or []
        count = min(len(expected), len(tokens))
        if list(tokens[:count]) != expected[:count]:
            self.ahead = Future()
            self.ahead.set_exception(ValueError("a token came in place of the only one that was allowed"))
            self.expected = []
        elif len(tokens) > count:
            self.ahead = self.matcher.advance(tokens[count:])
            self.expected = None
        else:
            self.expected = expected[count:]

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as they are known now."""
        if self.expected is None and self.ahead.done() and self.ahead.exception() is None:
            self.expected = self.ahead.result()[0]
        return self.expected or []

    def mask(self, position: int, timeout_s: float) -> bytes:
        """The mask of the token at `position`. Waits for it."""
        _, mask = self.ahead.result(timeout_s)
        forced, index = self.forced(), position - self.num_known
        if not 0 <= index < len(forced):
            return mask
        only = bytearray(len(mask))
        only[forced[index] >> 3] = 1 << (forced[index] & 7)
        return bytes(only)


class GrammarMasks:
    """Makes the masks of guided chunks.

    Each live sample of a request with a grammar is `Guided`. Its mask is computed on other threads as soon as the last
    of its tokens is known, while the device computes the logits. Owned by the engine thread.
    """

    def __init__(self, grammars: Grammars, clock: Callable[[], float]) -> None:
        self._grammars = grammars
        self._clock = clock
        self._guided: dict[int, dict[int, Guided]] = {}  # by request, by sample
        self._advancing: dict[tuple[int, int], Guided] = {}  # with forced tokens that were not reported yet

    def prepare(self, request: Request) -> "Future[None] | None":
        """Compile the grammar of `request` on another thread; None if there is nothing to wait for."""
        return None if request.grammar is None else self._grammars.prepare(request.grammar)

    def matchers(self, request: Request, so_far: SoFar) -> dict[int, Matcher]:
        """A matcher for each unfinished sample. Raises InvalidRequest if the grammar is wrong."""
        grammar = request.grammar
        if grammar is None:
            return {}
        return {sample: self._grammars.matcher(grammar) for sample, tokens in enumerate(so_far) if tokens is not None}

    def begin(self, request: Request, so_far: SoFar, matchers: dict[int, Matcher]) -> None:
        if matchers:
            self._guided[request.request_id] = guided = {
                sample: Guided(matcher, len(request.prompt), so_far[sample] or ())
                for sample, matcher in matchers.items()
            }
            self._advancing |= {(request.request_id, sample): sequence for sample, sequence in guided.items()}

    def advance(self, updates: Iterable[Update]) -> None:
        """Follow the tokens of a step."""
        if not self._guided:
            return
        for update in updates:
            guided = self._guided.get(update.request_id)
            if guided is None:
                continue
            if update.finish is not None:
                del guided[update.sample]
                self._advancing.pop((update.request_id, update.sample), None)
            elif update.tokens:
                sequence = guided[update.sample]
                sequence.append(update.tokens)
                if sequence.expected is None:
                    self._advancing[update.request_id, update.sample] = sequence

    def forced(self) -> Iterator[tuple[int, int, list[int]]]:
        """Requests, samples and the tokens that must come next, as far as known and not reported before."""
        for (request_id, sample), guided in list(self._advancing.items()):
            if guided.ahead.done():
                del self._advancing[request_id, sample]
                if tokens := guided.forced():
                    yield request_id, sample, tokens

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        for sample in self._guided.pop(request_id, {}):
            self._advancing.pop((request_id, sample), None)

    def masks(self, plan: StepPlan) -> tuple[dict[int, bytes], list[Failure]]:
        """The masks of the guided chunks of `plan` by index, and the requests that have none.

        Called when the results of all steps before it are known. A sequence that has ended meanwhile has no mask: its
        tokens are dropped.
        """
        until_s = self._clock() + MASKS_WITHIN_S
        masks: dict[int, bytes] = {}
        failures: dict[int, Failure] = {}
        for index in plan.guided:
            chunk = plan.chunks[index]
            request_id = chunk.request_id
            guided = self._guided.get(request_id, {}).get(chunk.sample)
            if guided is None:
                continue
            try:
                masks[index] = guided.mask(chunk.start + chunk.length, max(0.0, until_s - self._clock()))
            except TimeoutError:
                reason = f"grammar is too complex: a token took longer than {MASKS_WITHIN_S:g} s"
                failures[request_id] = Failure(request_id, RequestFailed(reason))
            except Exception as error:  # of any kind; only this request is affected
                error.__traceback__ = None  # it holds the sample, which holds the error
                reason = f"grammar cannot be followed any further: {error}"
                failures[request_id] = Failure(request_id, RequestFailed(reason))
        return masks, list(failures.values())
