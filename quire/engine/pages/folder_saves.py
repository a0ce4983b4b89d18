"""Pages of prompts that are written to a folder."""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from quire.engine.pages.store import DigestOf, PageReader, PageStore
from quire.engine.port import Task
from quire.page_folder.page_file import PageName
from quire.page_folder.page_folder import PageFolder
from quire.request import Request

log = logging.getLogger(__name__)

MAX_WAITING = 64  # prompts with pages to write; no more are remembered
PIECE_BYTES = 32 * 2**20  # of pages that are copied from the device at a time, or one page where that is larger
SCAN_S = 60.0  # between two looks at the files of others
PAUSE_S = 60.0  # without writing, after a file could not be written
# Outcomes of prompts. Of all but the first some pages are not kept.
WRITTEN, FAILED = "written", "failed"
EVICTED = "evicted"  # from the cache before they were written, or the folder is too small for the prompt
SKIPPED = "skipped"  # files cannot be written now, or the engine has no time
FULL = "full"  # too many wait
OUTCOMES = (WRITTEN, EVICTED, FAILED, SKIPPED, FULL)


class Save(NamedTuple):
    """A prompt that was computed."""

    request: Request
    adapter_digest: str
    names: list[bytes]  # of its pages
    rows: list[tuple[int, int]]  # the pages to write: places in the prompt, and groups
    end: int

    def name_of(self, row: tuple[int, int]) -> PageName:
        place, group = row
        return self.names[place], group


class FolderSaves:
    """Writes what requests have computed, when they end, on a thread of its own.

    Nothing waits for it and nothing is held for it: what is evicted before it is written, or exceeds what may be
    written in a second, is not kept. `note` and `forget` are called by the engine thread.
    """

    def __init__(
        self, folder: PageFolder, store: PageStore, page_bytes: int, digest_of: DigestOf, max_bytes_per_s: float
    ) -> None:
        self._folder = folder
        self._store = store
        self._page_bytes = page_bytes
        self._digest_of = digest_of
        self._max_bytes_per_s = max_bytes_per_s
        self._live: dict[int, Request] = {}
        self._waiting: queue.Queue[Save] = queue.Queue(MAX_WAITING)
        self._paused_until_s = 0.0
        self.counters: Counter[str] = Counter()

    def start(self, run: Callable[[Task], None]) -> None:
        """The engine runs. `run` gives its thread a task."""
        reader = PageReader(self._store, run)
        threading.Thread(target=self._run, args=(reader,), name="quire-folder-write", daemon=True).start()

    def counted(self) -> dict[str, int]:
        """Prompts by what became of their pages, since the start."""
        return {f"saves_{outcome}": self.counters[outcome] for outcome in OUTCOMES}

    def note(self, request: Request) -> None:
        """A request has come."""
        self._live[request.request_id] = request

    def forget(self, request_id: int, is_finished: bool) -> None:
        """The request has ended. Where it `is_finished`, keep those of its pages that are in the cache and not in the
        folder."""
        request = self._live.pop(request_id, None)
        if request is None or not is_finished:
            return
        try:
            digest = self._digest_of(request.adapter)
            # Its adapter may have lost its name since, and is then not here any more.
            if digest is not None and request.adapter_digest in ("", digest):
                self._offer(request, digest)
        except Exception:  # of ours; the answer is complete, its pages are not kept
            log.exception("the pages of a prompt cannot be kept")

    def _offer(self, request: Request, adapter_digest: str) -> None:
        names = self._store.names(request, adapter_digest)
        firsts, end = self._store.find(request, 0)
        rows = [(place, group) for group, first in enumerate(firsts) for place in range(first, end)]
        missing = [row for row in rows if not self._folder.has((names[row[0]], row[1]))]
        if not missing:
            return
        try:
            self._waiting.put_nowait(Save(request, adapter_digest, names, missing, end))
        except queue.Full:
            self.counters[FULL] += 1

    def _run(self, reader: PageReader) -> None:
        scanned_s = time.monotonic()
        while True:
            if time.monotonic() - scanned_s > SCAN_S:
                self._folder.scan()
                scanned_s = time.monotonic()
            try:
                save = self._waiting.get(timeout=SCAN_S)
            except queue.Empty:
                continue
            try:
                self.counters[self._write(save, reader)] += 1
            except TimeoutError:  # the engine is busy, or has stopped
                self.counters[SKIPPED] += 1
            except Exception:  # of ours, or of the device; the pages are not kept
                self.counters[FAILED] += 1
                log.exception("pages cannot be written to the cache folder")

    def _write(self, save: Save, reader: PageReader) -> str:
        """The outcome, in a word."""
        if time.monotonic() < self._paused_until_s:
            return SKIPPED
        size = self._page_bytes
        count = max(1, PIECE_BYTES // size)
        saved_ns = self._folder.now_ns()
        for begin in range(0, len(save.rows), count):
            begun_s = time.monotonic()
            rows = [row for row in save.rows[begin : begin + count] if not self._folder.has(save.name_of(row))]
            if not rows:
                continue
            # Another adapter may have got the name meanwhile.
            data = reader.read(
                save.request, rows, save.end, lambda: self._digest_of(save.request.adapter) == save.adapter_digest
            )
            if data is None:
                return EVICTED
            for at, row in enumerate(rows):
                if not self._folder.write(save.name_of(row), data[at * size : (at + 1) * size], row[0], saved_ns):
                    self._paused_until_s = time.monotonic() + PAUSE_S
                    return FAILED
            if not self._folder.has(save.name_of(rows[-1])):
                return EVICTED
            time.sleep(max(0.0, begun_s + len(data) / self._max_bytes_per_s - time.monotonic()))
        return WRITTEN
