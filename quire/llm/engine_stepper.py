"""The engine, shared by the runs of one process."""

from _thread import LockType, allocate_lock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from threading import current_thread, get_ident, main_thread
from typing import Protocol

from quire.engine.engine import Engine
from quire.errors import EngineFailed, QuireError, RequestFailed
from quire.ipc.messages import Failure, Update
from quire.request import Request

PATIENCE_S = 0.1  # after which a thread that was interrupted while it waited for its turn delays no other


class Receiver(Protocol):
    """A run: receives the messages of its requests until it is over. Any thread may give it one."""

    @property
    def is_over(self) -> bool: ...

    @property
    def has_messages(self) -> bool: ...

    def receive(self, message: Update | Failure) -> None: ...


_TURN = "turn"


class _Turn:
    """Given with operations that no interrupt divides, in place of a lock that one could leave locked."""

    def __init__(self, thread: int, run: Receiver | None) -> None:
        """`run`: that it is for, if the thread may be interrupted."""
        self.thread = thread
        self._run = run
        self.taken_over = allocate_lock()

    @property
    def is_abandoned(self) -> bool:
        """True if an interrupt has kept its thread from ending it."""
        return self._run is not None and self._run.is_over


class EngineStepper:
    """Steps the engine when any run needs it, and gives every run its own messages.

    So several iterators can be open at the same time, in one thread or in several, each advanced when its owner likes,
    and none misses a token. The threads take turns: one steps the engine for all, and the others wait for messages.

    An interrupt may come at any moment, also half way through a step. `_is_at_work` stays set then, and the engine
    starts over before it is used again: every request that was under way has ended. Interrupts come to the main thread;
    as long as other threads have requests, a thread of the stepper takes its turns, and theirs go on. A run may also be
    closed by the garbage collector at any moment, so what it leaves is aborted when the engine is at hand.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runs: dict[int, Receiver] = {}  # by request under way
        self._open: dict[Receiver, int] = {}  # those that may have any, with the thread that used each last
        self._left: list[int] = []  # requests to abort
        self._is_at_work = False
        self._is_closed = False
        self._turn: dict[str, _Turn] = {}  # the one there is
        self._bells: list[LockType] = []  # of threads that wait for its end
        self._waiting: set[int] = set()  # threads that want a turn for more than to step
        self._calls: dict[object, int] = {}  # under way, with their threads

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of this thread, during which no other thread may end the engine."""
        this = object()
        try:
            self._calls[this] = get_ident()
            yield
        finally:
            self._calls.pop(this, None)

    def end(self) -> None:
        """Refuse all that would use the engine from now on. Raises while another thread uses it."""
        if not {*self._calls.values(), *(one.thread for one in list(self._turn.values()))} <= {get_ident()}:
            raise RuntimeError("another thread is using this LLM; it can be closed when that has ended")
        self._is_closed = True
        if "_apart" in self.__dict__:
            self._apart.shutdown(wait=False)

    def refuse_if_ended(self) -> None:
        if self._is_closed:
            raise RuntimeError("this LLM is closed")

    def submit(self, run: Receiver, request: Request) -> None:
        """Queue a request of `run`; raises what it is refused with."""

        def add(engine: Engine) -> None:
            self._runs[request.request_id] = run
            try:
                engine.add(request)
            except QuireError:
                del self._runs[request.request_id]
                raise

        self._open[run] = get_ident()
        self._use(add, run)

    def step(self, run: Receiver) -> None:
        """Return when `run` has messages, or after one step."""
        self._open[run] = get_ident()
        self._use(self._step, run, awaits=True)

    def _step(self, engine: Engine) -> None:
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
        is_at_hand = not self._turn and not self._is_at_work and not self._is_closed
        if self._left and is_at_hand and not self._others():
            self._use(lambda engine: None, run)

    @contextmanager
    def turn(self, run: Receiver | None = None, awaits: bool = False) -> Iterator[bool]:
        """The turn of this thread, which works for `run`. False if it `awaits` messages and they have come before."""
        mine = _Turn(get_ident(), run if _may_be_interrupted() else None)
        try:
            yield self._take(mine, run if awaits else None)
        finally:
            if self._turn.get(_TURN) is mine:
                del self._turn[_TURN]
            self._waiting.discard(mine.thread)
            for _ in range(len(self._bells)):
                with suppress(IndexError):  # another thread rings too
                    self._bells.pop().release()

    def _take(self, mine: "_Turn", awaiting: Receiver | None) -> bool:
        this = mine.thread
        while awaiting is None or not awaiting.has_messages:
            bell = allocate_lock()
            bell.acquire()
            self._bells.append(bell)  # before it looks, so that it misses no end of a turn
            if awaiting is None:
                self._waiting.add(this)
            # A thread that steps would else take the next turn before those that wait have woken.
            if awaiting is None or self._waiting <= {this}:
                held = self._turn.setdefault(_TURN, mine)
                if held is mine:
                    return True
                if (held.thread == this or held.is_abandoned) and held.taken_over.acquire(blocking=False):
                    del self._turn[_TURN]
                    continue
            if not bell.acquire(timeout=PATIENCE_S) and not self._turn:
                self._waiting.clear()
        return False

    def _others(self) -> bool:
        """True if other threads have runs."""
        return any(thread != get_ident() for thread in list(self._open.values()))

    @cached_property
    def _apart(self) -> ThreadPoolExecutor:
        """Takes turns of the main thread, which may be interrupted, while other threads have requests."""
        return ThreadPoolExecutor(1, "quire-llm")

    def _use(self, work: Callable[[Engine], None], run: Receiver, awaits: bool = False) -> None:
        """Work with the engine when it is this thread's turn; not if it `awaits` messages of `run` that come before."""
        with self.turn(run, awaits) as is_mine:
            if not is_mine:
                return
            self.refuse_if_ended()
            is_apart = _may_be_interrupted() and self._others()
            if not is_apart:
                self._work(work)
        if is_apart:
            self._apart.submit(self._use, work, run, awaits).result()

    def _work(self, work: Callable[[Engine], None]) -> None:
        if self._is_at_work:
            self._start_over()
        self._is_at_work = True
        # An interrupt came while they were closed, or before `_apart` had added their requests.
        for run in [run for run in {*list(self._open), *list(self._runs.values())} if run.is_over]:
            self._drop_all(run)
        while self._left:
            self.engine.abort(self._left.pop())
        try:
            work(self.engine)
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


def _may_be_interrupted() -> bool:
    return current_thread() is main_thread()
