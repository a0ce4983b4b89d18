"""The requests of one call of `LLM.generate` or `LLM.stream`."""

from collections import deque
from collections.abc import Callable, Generator
from inspect import GEN_CLOSED, getgeneratorstate
from typing import NamedTuple
from weakref import ref

from quire.errors import QuireError
from quire.ipc.messages import Failure, Update
from quire.llm.completion import CompletionBuilder, Delta
from quire.llm.engine_stepper import EngineStepper
from quire.request import Request


class BatchItem(NamedTuple):
    """A prompt: its request, or the error that it has instead; and an answer for each sample."""

    request: Request | None
    error: QuireError | None
    answers: list[CompletionBuilder]


class Run:
    """Iterating drives the engine until all items are done; leaving the iteration early aborts the others."""

    def __init__(
        self, stepper: EngineStepper, items: list[BatchItem], on_failure: Callable[[int, QuireError], None]
    ) -> None:
        self._stepper = stepper
        self._on_failure = on_failure
        self._items = items
        self._inbox: deque[Update | Failure] = deque()
        self._index: dict[int, int] = {}  # of those under way, by request id
        self._deltas: ref[Generator[Delta, None, None]] | None = None  # weak: dropping it closes it

    def __iter__(self) -> Generator[Delta, None, None]:
        deltas = self._iterate()
        self._deltas = ref(deltas)
        return deltas

    @property
    def is_over(self) -> bool:
        deltas = None if self._deltas is None else self._deltas()
        return deltas is None or getgeneratorstate(deltas) == GEN_CLOSED

    @property
    def has_messages(self) -> bool:
        return bool(self._inbox)

    def receive(self, message: Update | Failure) -> None:
        self._inbox.append(message)

    def _iterate(self) -> Generator[Delta, None, None]:
        try:
            self._enter_all()
            while self._index:
                while self._inbox:
                    delta = self._apply(self._inbox.popleft())
                    if delta is not None:
                        yield delta
                if self._index:
                    self._stepper.step(self)
        finally:
            self._stepper.close(self)

    def _enter_all(self) -> None:
        for index, item in enumerate(self._items):
            if item.request is None:
                assert item.error is not None
                self._refuse(index, item.error)
                continue
            try:
                self._stepper.submit(self, item.request)
            except QuireError as error:
                self._refuse(index, error)
            else:
                self._index[item.request.request_id] = index

    def _refuse(self, index: int, error: QuireError) -> None:
        for answer in self._items[index].answers:
            if not answer.is_done:
                answer.fail(error)
        self._on_failure(index, error)

    def _apply(self, message: Update | Failure) -> Delta | None:
        request_id = message.request_id
        index = self._index.get(request_id)
        if index is None:
            return None  # it has ended in the meantime
        if isinstance(message, Failure):
            self._end(request_id)
            self._refuse(index, message.error)
            return None
        answers = self._items[index].answers
        answer = answers[message.sample]
        if answer.is_done:
            return None  # tokens that were under way when its stop string was found
        delta = answer.apply(index, message)
        if all(answer.is_done for answer in answers):
            self._end(request_id)  # after a stop string the engine would continue
        return delta

    def _end(self, request_id: int) -> None:
        del self._index[request_id]
        self._stepper.drop(request_id)
