"""The pages of an engine, as peers and folders read and write them."""

from collections.abc import Callable, Sequence

from quire.core.scheduler import Scheduler
from quire.engine.executor import Executor
from quire.peers.bundle import PageBundle, PageForm, PageRange
from quire.request import Request


class PageStore:
    """Implements the `Store` of page traffic. Pages that come are written into the host tier, which the scheduler
    matches; those that go are copied from the device. Owned by the engine thread."""

    def __init__(self, scheduler: Scheduler, executor: Callable[[], Executor], form: PageForm) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._form = form

    @property
    def room(self) -> int:
        return self._scheduler.exchange.room

    def num_cached(self, request: Request) -> int:
        return self._scheduler.exchange.num_cached(request)

    def names(self, request: Request, adapter_digest: str) -> list[bytes]:
        return self._scheduler.exchange.names(request, adapter_digest)

    def insert(self, request: Request, bundle: PageBundle, begin: int, count: int) -> int | None:
        exchange, size = self._scheduler.exchange, self._form.page_bytes
        reserved = exchange.reserve(request, bundle.range.rows()[begin : begin + count])
        if reserved is None:
            return None
        data = [bundle.data[(begin + place) * size : (begin + place + 1) * size] for place, _ in reserved]
        pages = [one for _, one in reserved]
        try:
            self._executor().write_host_pages([one.page for one in pages], data)
        except BaseException:
            exchange.abandon(pages)
            raise
        exchange.confirm(pages)
        return len(pages)

    def find(self, request: Request, first: int) -> PageRange:
        return PageRange(*self._scheduler.exchange.find(request, first))

    def read(self, request: Request, rows: Sequence[tuple[int, int]], end: int) -> Callable[[], memoryview] | None:
        pages = self._scheduler.exchange.pages(request, rows, end)
        return None if pages is None else self._executor().read_pages(pages)
