"""Pages of a prompt that a thread brings."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError

from quire.peers.bundle import PageBundle


class PageArrival:
    """Pages that a thread brings, in time or not. `result` is None where there are none; it never has an exception.

    They take memory until the thread has ended, and they are entered or not wanted: then `release` is called, once.
    """

    begins_again = False

    def __init__(self, release: Callable[[], None]) -> None:
        self.result: Future[PageBundle | None] = Future()
        self.is_cancelled = self.is_late = False
        self._release = release
        self._is_coming = self._is_wanted = True
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """The pages are not wanted any more."""
        self.is_cancelled = True
        self.stop()
        self.inserted()

    def inserted(self) -> None:
        """As many of the pages as could be entered are entered."""
        with self._lock:
            is_last = self._is_wanted and not self._is_coming
            self._is_wanted = False
        if is_last:
            self._release()

    def expire(self) -> None:
        """Its time is over. Whatever its thread waits for, the prompt does not."""
        self.is_late = not self.result.done()
        self.stop()
        self._resolve(None)

    def end(self, bundle: PageBundle | None) -> None:
        """The thread has ended. Its pages do not count where the time was over before."""
        with self._lock:
            self._is_coming = False
            is_last = not self._is_wanted
        if is_last:
            self._release()
        self._resolve(bundle)

    def stop(self) -> None:
        """Wake the thread, if it waits for something that can be ended."""

    def _resolve(self, bundle: PageBundle | None) -> None:
        with contextlib.suppress(InvalidStateError):
            self.result.set_result(bundle)
