"""One call's requests on their way through the engine."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from quire.engine.engine import Engine
from quire.engine.messages import Update
from quire.errors import EngineFailed, QuireError
from quire.llm.completion import Answer, Delta
from quire.request import Request


class Ask(NamedTuple):
    """A prompt: its request, or the reason why there is none; and its answers, one for each sample."""

    request: Request | None
    error: QuireError | None
    answers: list[Answer]


class Turnstile:
    """Steps the engine for whichever run wants to go on, and hands every run what concerns it.

    So several iterators can be open at the same time, each advanced when its owner likes, and none misses a token.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runs: dict[int, Run] = {}

    def enter(self, run: "Run", request: Request) -> None:
        self.engine.add(request)
        self._runs[request.request_id] = run

    def leave(self, request_id: int) -> None:
        if self._runs.pop(request_id, None) is not None:
            self.engine.abort(request_id)

    def step(self) -> None:
        if self.engine.is_idle:
            raise EngineFailed("the engine has nothing to do, and a request has no answer")
        outcome = self.engine.step()
        for failure in outcome.failures:
            if failure.request_id in self._runs:
                self._runs[failure.request_id].fail(failure.request_id, failure.error)
        for update in outcome.updates:
            if update.request_id in self._runs:
                self._runs[update.request_id].inbox.append(update)


class Run:
    """Iterating drives the engine until all are done; leaving the iteration early ends what is not."""

    def __init__(self, turnstile: Turnstile, asks: list[Ask], on_failure: Callable[[int, QuireError], None]) -> None:
        self.inbox: deque[Update] = deque()
        self._turnstile = turnstile
        self._on_failure = on_failure
        self._asks = asks
        self._index: dict[int, int] = {}  # of those under way, by request id

    def __iter__(self) -> Iterator[Delta]:
        try:
            self._enter_all()
            while self._index:
                while self.inbox:
                    update = self.inbox.popleft()
                    delta = self._take(update)
                    if delta is not None:
                        yield delta
                if self._index:
                    self._turnstile.step()
        finally:
            for request_id in list(self._index):
                self._turnstile.leave(request_id)

    def fail(self, request_id: int, error: QuireError) -> None:
        index = self._index.pop(request_id)
        self._turnstile.leave(request_id)
        self._refuse(index, error)

    def _enter_all(self) -> None:
        for index, ask in enumerate(self._asks):
            if ask.request is None:
                assert ask.error is not None
                self._refuse(index, ask.error)
                continue
            try:
                self._turnstile.enter(self, ask.request)
            except QuireError as error:
                self._refuse(index, error)
            else:
                self._index[ask.request.request_id] = index

    def _refuse(self, index: int, error: QuireError) -> None:
        for answer in self._asks[index].answers:
            if not answer.is_done:
                answer.fail(error)
        self._on_failure(index, error)

    def _take(self, update: Update) -> Delta | None:
        index = self._index.get(update.request_id)
        if index is None:
            return None  # it has failed since
        answers = self._asks[index].answers
        answer = answers[update.sample]
        if answer.is_done:
            return None  # tokens that were under way when its stop string was found
        text = answer.take(update)
        reason = answer.completion.finish_reason
        if all(answer.is_done for answer in answers):
            del self._index[update.request_id]
            self._turnstile.leave(update.request_id)  # where a stop string ended it, the engine does not know
        return Delta(index, update.sample, text, update.tokens, reason, update.logprobs)
