"""Pages that other threads read from the device."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from quire.engine.port import Task
from quire.request import Request

READ_S = 30.0  # that the engine thread has to begin; a long step may run


class Readable(Protocol):
    """The pages of this engine. Used by the engine thread."""

    def read(self, request: Request, rows: Sequence[tuple[int, int]], end: int) -> Callable[[], memoryview] | None: ...


class PageReader:
    """Reads pages of prompts, a piece at a time, for a thread that waits for them.

    The engine thread launches the copy between two steps. Between two pieces the pages are as any others of the cache,
    so that nothing is held for a reader.
    """

    def __init__(self, store: Readable, run: Callable[[Task], None]) -> None:
        """`run` gives a task to the engine thread."""
        self._store = store
        self._run = run

    def read(
        self,
        request: Request,
        rows: Sequence[tuple[int, int]],
        end: int,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> memoryview | None:
        """The bytes of these pages, of those that end at page `end`. None where they are gone, or where `is_wanted`,
        which the engine thread asks, says no. Raises TimeoutError."""
        reading: Future[Callable[[], memoryview] | None] = Future()

        def read() -> None:
            try:
                reading.set_result(self._store.read(request, rows, end) if is_wanted() else None)
            except Exception as error:
                reading.set_exception(error)

        self._run(Task(read))
        wait = reading.result(READ_S)
        return None if wait is None else wait()
