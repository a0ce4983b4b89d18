"""Pages of prompts that are read from a folder."""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any

from quire.engine.pages.store import PageStore
from quire.engine.pages.traffic import within_s
from quire.page_folder.page_folder import PageFolder
from quire.peers.bundle import PageBundle, PageForm, PageRange, longest_range
from quire.peers.page_arrival import PageArrival
from quire.request import Request
from quire.settings.machine import num_processors

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # to read the pages of a prompt; then it is computed
MAX_READ_BYTES = 2 * 2**30  # of pages that come, or wait to be entered; one prompt alone may have more
READERS = max(1, min(4, num_processors() // 2))  # threads that read files and check them
ROWS_AT_ONCE = 16 * READERS  # between two looks whether they are still wanted
LAST_SHARE = 0.25  # of the newest read in the mean time of a page
TRY_AGAIN_S = 600.0  # after which the time of a page counts as unknown
# Outcomes. After all but the first two the prompt is computed.
FOUND, WAITED = "found", "waited"  # the latter: another request brought the pages
LATE, CANCELLED, DAMAGED = "late", "cancelled", "damaged"
FULL, STUCK, SLOWER = "full", "stuck", "slower"  # nothing is read: too much is, or it takes longer than computing
OUTCOMES = (FOUND, WAITED, LATE, CANCELLED, DAMAGED, FULL, STUCK, SLOWER)


class FolderRead(PageArrival):
    """The pages of a prompt that are read."""

    def __init__(self, release: Callable[[], None]) -> None:
        super().__init__(release)
        self.is_inserted: Future[None] = Future()  # or never will be

    def inserted(self) -> None:
        super().inserted()
        with contextlib.suppress(InvalidStateError):
            self.is_inserted.set_result(None)


class ReadTimes:
    """The time that a page takes to be read. Written by the thread that reads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._page_s: float | None = None
        self._read_at_s = 0.0

    def measure(self, num_pages: int, took_s: float) -> None:
        page_s, before = took_s / num_pages, self._page_s
        self._page_s = page_s if before is None else before + LAST_SHARE * (page_s - before)
        self._read_at_s = self._clock()

    @property
    def page_s(self) -> float | None:
        """None where nothing was read for some time."""
        return None if self._clock() - self._read_at_s > TRY_AGAIN_S else self._page_s


class FolderWait:
    """Implements `Arriving` for a request that waits for pages another one reads."""

    begins_again = True

    def __init__(self, other: FolderRead) -> None:
        self.result: Future[Any] = Future()
        other.is_inserted.add_done_callback(lambda _: self.result.set_result(None))

    def cancel(self) -> None: ...

    def inserted(self) -> None: ...


class FolderSource:
    """Implements `PageSource`: reads pages of prompts from files, one prompt at a time, on threads of its own."""

    def __init__(
        self,
        folder: PageFolder,
        store: PageStore,
        form: PageForm,
        compute_s: Callable[[int, int], float | None] = lambda num_tokens, num_cached: None,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compute_s`: the time to compute tokens after those that are cached; None while it is not known, and pages
        are read then."""
        self._folder = folder
        self._store = store
        self._form = form
        self._compute_s = compute_s
        self.read_times = ReadTimes(clock)
        self._timeout_s = timeout_s
        self._prompts = ThreadPoolExecutor(1, "quire-folder")
        self._files = ThreadPoolExecutor(READERS, "quire-folder-read")
        self._under_way: dict[bytes, FolderRead] = {}  # by the name of the first page
        self._current: FolderRead | None = None  # that the thread is at
        self._lock = threading.Lock()
        self._read_bytes = 0
        self.counters: Counter[str] = Counter()

    def begin(self, request: Request, adapter_digest: str) -> "FolderRead | FolderWait | None":
        names = self._store.names(request, adapter_digest)
        if not names:
            return None
        first = self._store.num_cached(request)
        most = min(len(names), first + self._store.room // len(self._form.groups))
        pages = longest_range(self._form, first, most, lambda place, group: self._folder.has((names[place], group)))
        if pages.end <= first:
            return None
        other = self._under_way.get(names[first])
        if other is not None and not other.is_inserted.done():
            self._note(WAITED)
            return FolderWait(other)
        if (reason := self._refusal(pages, first)) is not None:
            self._note(reason)
            return None
        return self._read(names, pages, first, within_s(request, self._timeout_s))

    def counted(self, num_unused: int) -> dict[str, int]:
        reads = {f"reads_{outcome}": self.counters[outcome] for outcome in OUTCOMES}
        return self._folder.counted() | reads | {"reads_unused": num_unused}

    def close(self) -> None:
        self._prompts.shutdown(wait=False, cancel_futures=True)
        self._files.shutdown(wait=False, cancel_futures=True)

    def _refusal(self, pages: PageRange, first: int) -> str | None:
        """The reason not to read these pages."""
        current = self._current
        if current is not None and current.is_late:
            return STUCK
        if self._read_bytes and self._read_bytes + pages.num_pages * self._form.page_bytes > MAX_READ_BYTES:
            return FULL
        size, page_s = self._form.page_size, self.read_times.page_s
        compute_s = self._compute_s((pages.end - first) * size, first * size)
        is_slower = page_s is not None and compute_s is not None and pages.num_pages * page_s > compute_s
        return SLOWER if is_slower else None

    def _read(self, names: Sequence[bytes], pages: PageRange, first: int, limit_s: float) -> FolderRead:
        num_bytes = pages.num_pages * self._form.page_bytes
        read = FolderRead(lambda: self._add_bytes(-num_bytes))
        timer = threading.Timer(limit_s, read.expire)
        timer.daemon = True
        timer.start()  # which may fail: nothing waits for the read yet
        self._under_way[names[first]] = read
        read.is_inserted.add_done_callback(lambda _: self._under_way.pop(names[first], None))
        self._add_bytes(num_bytes)

        def run() -> None:
            bundle = None
            try:
                self._current = read
                bundle = None if read.is_late or read.is_cancelled else self._bundle(read, names, pages, first)
            except Exception:  # of ours
                log.exception("the pages of a prompt cannot be read")
            finally:
                timer.cancel()
                self._current = None
            ended = LATE if read.is_late else CANCELLED if read.is_cancelled else DAMAGED if bundle is None else FOUND
            self._note(ended)
            read.end(bundle)
            if bundle is not None:
                places = range(bundle.range.end)
                self._folder.touch([((names[n], g), n) for n in places for g in range(len(self._form.groups))])

        try:
            self._prompts.submit(run)
        except Exception:  # there is no thread: nothing may wait for it
            timer.cancel()
            read.cancel()
            read.end(None)
            raise
        return read

    def _bundle(self, read: FolderRead, names: Sequence[bytes], pages: PageRange, first: int) -> PageBundle | None:
        """As many of the pages as can be read; None where none can, or they are not wanted any more."""
        read_rows: dict[tuple[int, int], memoryview] = {}
        failed: set[tuple[int, int]] = set()
        begun_s = time.monotonic()

        def can_be_had(place: int, group: int) -> bool:
            row = place, group
            return row in read_rows or (row not in failed and self._folder.has((names[place], group)))

        while pages.end > first:
            missing = [row for row in pages.rows() if row not in read_rows]
            if not missing:
                self.read_times.measure(len(read_rows), time.monotonic() - begun_s)
                return PageBundle(pages, self._together(read_rows, pages))
            rows = missing[:ROWS_AT_ONCE]
            read_all = self._files.map(lambda row: self._folder.read((names[row[0]], row[1])), rows)
            for row, data in zip(rows, read_all, strict=True):
                if data is None:
                    failed.add(row)
                else:
                    read_rows[row] = data
            if read.is_late:
                self.read_times.measure(max(1, len(read_rows)), time.monotonic() - begun_s)
            if read.is_late or read.is_cancelled:
                return None
            if failed:
                pages = longest_range(self._form, first, pages.end, can_be_had)
        return None

    def _together(self, read_rows: dict[tuple[int, int], memoryview], pages: PageRange) -> memoryview:
        """The contents of the pages in their order. Takes them out of `read_rows`, so that they are in memory once."""
        size = self._form.page_bytes
        data = memoryview(bytearray(pages.num_pages * size))
        for place, row in enumerate(pages.rows()):
            data[place * size : (place + 1) * size] = read_rows.pop(row)
        return data

    def _add_bytes(self, num_bytes: int) -> None:
        with self._lock:
            self._read_bytes += num_bytes

    def _note(self, outcome: str) -> None:
        with self._lock:
            self.counters[outcome] += 1
