"""The engine, shared by the runs of one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Protocol

from quire.engine.engine import Engine
from quire.errors import EngineFailed, QuireError, RequestFailed
from quire.ipc.messages import Failure, Update
from quire.request import Request


class Receiver(Protocol):
    """A run: receives the messages of its requests until it is over."""

    @property
    def is_over(self) -> bool: ...

    def receive(self, message: Update | Failure) -> None: ...


class EngineStepper:
    """Steps the engine when any run needs it, and gives every run its own messages.

    So several iterators can be open at the same time, each advanced when its owner likes, and none misses a token.

    An interrupt may come at any moment, also half way through a step. `_is_at_work` stays set then, and the engine
    starts over before it is used again: every request that was under way has ended. A run may also be closed by the
    garbage collector at any moment, so what it leaves is aborted when the engine is at hand.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runs: dict[int, Receiver] = {}  # by request under way
        self._open: dict[Receiver, None] = {}  # those that may have any
        self._left: list[int] = []  # requests to abort
        self._is_at_work = False
        self._is_closed = False
        self._threads: dict[str, int] = {}  # by purpose: the thread that uses the engine now

    @contextmanager
    def reserved(self, purpose: str = "generate") -> Iterator[None]:
        """Reserve the engine for this thread; raises while another thread has it."""
        this = get_ident()
        try:
            self._refuse_others(this)  # first: one that is refused must not be in the way of the other
            self._threads.setdefault(purpose, this)
            self._refuse_others(this)
            yield
        finally:
            if self._threads.get(purpose) == this:
                del self._threads[purpose]

    def _refuse_others(self, thread: int) -> None:
        if not set(self._threads.values()) <= {thread}:
            raise RuntimeError("another thread is using this LLM; one thread at a time can")

    def end(self) -> None:
        """Refuse all that would use the engine from now on."""
        self._is_closed = True

    def refuse_if_ended(self) -> None:
        if self._is_closed:
            raise RuntimeError("this LLM is closed")

    def submit(self, run: Receiver, request: Request) -> None:
        """Queue a request of `run`; raises what it is refused with."""
        with self._engine_in_order() as engine:
            self._open[run] = None
            self._runs[request.request_id] = run
            try:
                engine.add(request)
            except QuireError:
                del self._runs[request.request_id]
                raise

    def step(self) -> None:
        with self._engine_in_order() as engine:
            if not self._runs:
                return  # the engine started over, and its runs were notified
            if engine.is_idle:
                raise EngineFailed("the engine has nothing to do, and a request has no answer")
            outcome = engine.step()
            messages: list[Update | Failure] = [*outcome.failures, *outcome.updates]
            for message in messages:
                run = self._runs.get(message.request_id)
                if run is not None:
                    run.receive(message)

    def drop(self, request_id: int) -> None:
        """A run no longer needs `request_id`. It is aborted before the next step if it still runs."""
        if request_id in self._runs:
            self._left.append(request_id)
            self._runs.pop(request_id, None)

    def close(self, run: Receiver) -> None:
        """End `run` and drop its open requests."""
        self._drop_all(run)
        if self._left and not self._is_at_work and not self._is_closed and set(self._threads.values()) <= {get_ident()}:
            with self._engine_in_order():
                pass

    @contextmanager
    def _engine_in_order(self) -> Iterator[Engine]:
        with self.reserved("step"):
            self.refuse_if_ended()
            if self._is_at_work:
                self._start_over()
            self._is_at_work = True
            for run in [run for run in self._open if run.is_over]:  # an interrupt came while it was closed
                self._drop_all(run)
            while self._left:
                self.engine.abort(self._left.pop())
            try:
                yield self.engine
            except QuireError:
                self._is_at_work = False  # a refusal, which changes nothing
                raise
            self._is_at_work = False

    def _start_over(self) -> None:
        error = RequestFailed("the engine was interrupted, and everything that ran has ended")
        for request_id, run in list(self._runs.items()):
            run.receive(Failure(request_id, error))
        self.engine.start_over()
        self._runs.clear()
        self._open.clear()
        self._left.clear()

    def _drop_all(self, run: Receiver) -> None:
        for request_id in [one for one, other in list(self._runs.items()) if other is run]:
            self.drop(request_id)
        self._open.pop(run, None)
