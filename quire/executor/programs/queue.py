"""Programs that wait to be made."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Condition
from typing import Any

from quire.executor.programs.table import Key


class ProgramQueue:
    """Programs that wait for a thread. Each is chosen when one is free, so that one that steps miss meanwhile comes
    before others. Any thread may call.

    Every future that `add` returns gets a result or an error, or is cancelled.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, make: Callable[[Key], Any], rank: Callable[[Key], tuple[float, int]] | None
    ) -> None:
        """`rank`: of a program that waits; the lowest is made next. Without it they are made as they come."""
        self._pool = pool
        self._make = make
        self._rank = rank
        self._changed = Condition()  # with the lock of all that follows
        self._waiting: dict[Key, Future[Any]] = {}
        self._num_making = 0
        self._most: int | None = None
        self._is_closed = False

    def add(self, key: Key, after: Future[Any] | None = None) -> Future[Any]:
        """`after`: one that has to be done before, whatever becomes of it; where it is cancelled, so is this."""
        future: Future[Any] = Future()
        if after is None:
            self._put(key, future)
        else:
            after.add_done_callback(lambda after: _cancel(future) if after.cancelled() else self._put(key, future))
        return future

    def limit(self, most: int | None) -> None:
        """From now on make no more than `most` at a time; None: as many as there are threads."""
        with self._changed:
            self._most = most
            self._changed.notify_all()

    def take(self) -> tuple[Key, Future[Any]] | None:
        """The next program, as soon as it may be made; None when nothing waits."""
        with self._changed:
            while self._most is not None and self._num_making >= self._most and not self._is_closed:
                self._changed.wait()
            if not self._waiting:
                return None
            key = next(iter(self._waiting)) if self._rank is None else min(self._waiting, key=self._rank)
            self._num_making += 1
            return key, self._waiting.pop(key)

    def close(self) -> None:
        """Cancel all that wait."""
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for future in waiting.values():
            _cancel(future)

    def _put(self, key: Key, future: Future[Any]) -> None:
        with self._changed, suppress(RuntimeError):  # the latter where the interpreter ends
            if not self._is_closed:
                self._pool.submit(self._make_one)
                self._waiting[key] = future
                return
        _cancel(future)

    def _make_one(self) -> None:
        taken = self.take()
        if taken is None:
            return
        key, future = taken
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(self._make(key))
        except BaseException as error:  # the owner of the future learns of it
            future.set_exception(error)
        finally:
            with self._changed:
                self._num_making -= 1
                self._changed.notify_all()


def _cancel(future: Future[Any]) -> None:
    """Cancel a future that has not begun, and tell those that wait for it."""
    future.cancel()
    future.set_running_or_notify_cancel()
