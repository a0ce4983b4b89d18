"""The pages of an engine, as peers and folders read and write them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from quire.core.scheduler import Scheduler
from quire.engine.executor import Executor
from quire.engine.port import Task
from quire.peers.bundle import PageBundle, PageForm, PageRange
from quire.request import Request

READ_S = 30.0  # that the engine thread has to begin to read pages; a long step may run

DigestOf = Callable[[str | None], str | None]  # an adapter's name to the digest of its weights; None where none is


class PageStore:
    """Pages that come are written into the host tier, which the scheduler matches; those that go are copied from the
    device. Owned by the engine thread."""

    def __init__(self, scheduler: Scheduler, executor: Callable[[], Executor], form: PageForm) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._form = form

    @property
    def room(self) -> int:
        """The most pages of a prompt that can be entered."""
        return self._scheduler.exchange.room

    def num_cached(self, request: Request) -> int:
        """Pages of the prompt that are here, from its beginning."""
        return self._scheduler.exchange.num_cached(request)

    def names(self, request: Request, adapter_digest: str) -> list[bytes]:
        """A name for each whole page of the prompt, the same in every process."""
        return self._scheduler.exchange.names(request, adapter_digest)

    def insert(self, request: Request, bundle: PageBundle, begin: int, count: int) -> int | None:
        """Enter pages of the bundle from the `begin`-th on, at most `count`. Returns the number of those that were not
        here already; None where there is no room."""
        exchange, size = self._scheduler.exchange, self._form.page_bytes
        reserved = exchange.reserve(request, bundle.range.rows()[begin : begin + count])
        if reserved is None:
            return None
        data = [bundle.data[(begin + place) * size : (begin + place + 1) * size] for place, _ in reserved]
        pages = [page for _, page in reserved]
        try:
            self._executor().write_host_pages([page.page for page in pages], data)
        except BaseException:
            exchange.abandon(pages)
            raise
        exchange.confirm(pages)
        return len(pages)

    def find(self, request: Request, first: int) -> PageRange:
        """The pages of the prompt from `first` on, as far as they are here."""
        return PageRange(*self._scheduler.exchange.find(request, first))

    def read(self, request: Request, rows: Sequence[tuple[int, int]], end: int) -> Callable[[], memoryview] | None:
        """Read pages, by their place in the prompt and their group, of those that end at page `end`; None where they
        are not here any more. Returns at once; any thread may call the function, which waits for them."""
        pages = self._scheduler.exchange.pages(request, rows, end)
        return None if pages is None else self._executor().read_pages(pages)


class PageReader:
    """Reads pages of prompts, a piece at a time, for a thread that waits for them.

    The engine thread launches the copy between two steps. Between two pieces the pages are as any others of the cache,
    so that nothing is held for a reader.
    """

    def __init__(self, store: PageStore, run: Callable[[Task], None]) -> None:
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
