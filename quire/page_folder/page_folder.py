"""Pages in the files of a folder, which several servers may share."""

import contextlib
import heapq
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.files.regular_file import open_regular
from quire.page_folder.page_file import BadPageFile, PageFiles, PageName

log = logging.getLogger(__name__)

SUBFOLDER = "quire-pages-1"  # of the folder that the user names; nothing outside it is touched
PARTS = "parts"  # of it: files that are being written
PART_S = 3600.0  # after which a file that is being written is that of a server that ended
TOUCH_S = 60.0  # between two uses that a file's time tells apart
KEY = re.compile(r"[0-9a-f]{32}")
PAGE = re.compile(r"([0-9a-f]{32})-(\d{1,4})\.page")
CORRUPT, EVICTED = "corrupt", "evicted"  # reasons to remove a file


class PageEntry(NamedTuple):
    num_bytes: int
    used_ns: int  # since the epoch


class PageFolder:
    """The pages of one model, with one set of settings, in files; those of other models count to the same limit.

    A file appears under its name when it is complete, and its contents are checked when it is read, so that servers may
    share a folder and none has to end well. What cannot be read or written is the lack of a page, and no more. Methods
    that say so use the disk. Any thread may use it.
    """

    def __init__(
        self, root: Path, files: PageFiles, max_bytes: int, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        assert KEY.fullmatch(files.key)
        self._root = root / SUBFOLDER
        self._files = files
        self._max_bytes = max_bytes
        self.now_ns = clock_ns
        self._lock = threading.Lock()
        self._entries: dict[str, PageEntry] = {}  # by path below the root
        self._by_use: list[tuple[int, str]] = []  # a heap of when they were used; one that is not so any more is void
        self._warned: set[str] = set()
        self.num_bytes = 0  # of all files
        self.num_pages = 0  # of this model
        self.counters: Counter[str] = Counter()

    def has(self, page: PageName) -> bool:
        """As far as is known without the disk."""
        return self._path(page) in self._entries

    def scan(self) -> None:
        """Find the files that are there: of earlier servers, and of others that use the folder now. Uses the disk."""
        with self._lock:
            before = dict(self._entries)
        try:
            _make(self._root / PARTS)
            found = dict(self._list())
            folder = os.stat(self._root)
        except OSError as error:
            self._warn("scan", f"{self._root} cannot be listed: {error.strerror}")
            return
        if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            self._warn("open", f"other users can write to {self._root}, and so change answers", remedy="")
        with self._lock:
            # The list is older than what this server wrote, used or removed meanwhile; those entries stay as they are.
            for path in before.keys() - self._entries.keys():
                found.pop(path, None)
            found |= {path: entry for path, entry in self._entries.items() if before.get(path) is not entry}
            self._entries = found
            self._by_use = [(entry.used_ns, path) for path, entry in found.items()]
            heapq.heapify(self._by_use)
            self.num_bytes = sum(entry.num_bytes for entry in found.values())
            self.num_pages = sum(self._is_own(path) for path in found)

    def read(self, page: PageName) -> memoryview | None:
        """The bytes of a page; None where they cannot be had. Uses the disk."""
        path = self._path(page)
        try:
            contents = _contents(self._root / path, self._files.num_bytes(page))
            data = self._files.decode(page, contents)
        except FileNotFoundError:  # another server removed it
            self._forget(path)
            return None
        except OSError as error:
            self._forget(path)
            self._count_one("read_errors")
            self._warn("read", f"{self._root / path} cannot be read: {error.strerror}")
            return None
        except BadPageFile as problem:
            self._remove(path, CORRUPT)
            self._warn(CORRUPT, f"{self._root / path}: {problem}; it is removed, and so are others like it")
            return None
        self._count_one("read_pages")
        self._count_one("read_bytes", len(data))
        return data

    def write(self, page: PageName, data: memoryview, place: int = 0, saved_ns: int | None = None) -> bool:
        """Keep a page; False where the disk fails. One that would be the first to go again is not kept. `place`: of the
        page in its prompt, whose pages all have one `saved_ns` (by default now): its last go first. Uses the disk."""
        path = self._path(page)
        parts = self._files.encode(page, data)
        size = sum(map(len, parts))
        used_ns = (self.now_ns() if saved_ns is None else saved_ns) - place
        if not self._make_room(size, used_ns):
            return True
        part = self._root / PARTS / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            _write(part, parts, used_ns)
            (self._root / path).parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(part, self._root / path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            self._count_one("write_errors")
            self._warn("write", f"pages cannot be written to {self._root}: {error.strerror}")
            return False
        with self._lock:
            self._warned.discard("write")
            self._drop(path)  # another server may have written it too
            self._enter(path, PageEntry(size, used_ns))
            self.num_bytes += size
            self.num_pages += 1
            self.counters["written_pages"] += 1
            self.counters["written_bytes"] += len(data)
        return True

    def touch(self, pages: Sequence[tuple[PageName, int]]) -> None:
        """These pages are used now. Each is with its place in its prompt: what follows a page is useless without it, so
        the first counts as used last. Uses the disk."""
        now_ns = self.now_ns()
        for page, place in pages:
            path = self._path(page)
            with self._lock:
                entry = self._entries.get(path)
                if entry is None or abs(now_ns - entry.used_ns) < TOUCH_S * 1e9:
                    continue
                self._enter(path, entry._replace(used_ns=now_ns - place))
            with contextlib.suppress(OSError):
                os.utime(self._root / path, ns=(now_ns - place, now_ns - place))

    def counted(self) -> dict[str, int]:
        """Numbers since the start, those that are 0 included."""
        names = ("read_pages", "read_bytes", "written_pages", "written_bytes", "read_errors", "write_errors")
        counted = {name: self.counters[name] for name in (*names, *(f"removed_{why}" for why in (CORRUPT, EVICTED)))}
        return counted | {"pages": self.num_pages, "bytes": self.num_bytes}

    def _path(self, page: PageName) -> str:
        digest, group = page
        return f"{self._files.key}/{digest.hex()}-{group}.page"

    def _list(self) -> Iterator[tuple[str, PageEntry]]:
        with os.scandir(self._root / PARTS) as parts:
            for part in parts:
                with contextlib.suppress(OSError):
                    if abs(self.now_ns() - part.stat(follow_symlinks=False).st_mtime_ns) > PART_S * 1e9:
                        os.unlink(part.path)
        with os.scandir(self._root) as folders:
            keys = [one.name for one in folders if KEY.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]
        for key in keys:
            try:
                yield from self._list_key(key)
            except FileNotFoundError:  # another server removed it
                pass
            except OSError as error:
                self._warn("list", f"{self._root / key} cannot be listed: {error.strerror}")

    def _list_key(self, key: str) -> Iterator[tuple[str, PageEntry]]:
        now_ns = self.now_ns()
        with os.scandir(self._root / key) as files:
            for file in files:
                with contextlib.suppress(OSError):  # removed meanwhile
                    found = file.stat(follow_symlinks=False)
                    if not PAGE.fullmatch(file.name) or not stat.S_ISREG(found.st_mode):
                        continue
                    if found.st_mtime_ns > now_ns:  # a clock was wrong: from now on the file ages as others do
                        with contextlib.suppress(OSError):
                            os.utime(file.path, ns=(now_ns, now_ns))
                    yield f"{key}/{file.name}", PageEntry(found.st_size, min(found.st_mtime_ns, now_ns))

    def _make_room(self, num_bytes: int, used_ns: int) -> bool:
        """Remove what was not used for longest, of whichever model; False where the rest was used after `used_ns`."""
        while self.num_bytes + num_bytes > self._max_bytes:
            with self._lock:
                oldest = self._oldest()
            if oldest is None:
                return True
            if used_ns <= oldest[0] <= self.now_ns():  # one from the future was written by a clock that was wrong
                return False
            self._remove(oldest[1], EVICTED)
        return True

    def _oldest(self) -> tuple[int, str] | None:
        """When the page that was not used for longest was used, and its path. Under the lock."""
        while self._by_use:
            used_ns, path = self._by_use[0]
            entry = self._entries.get(path)
            if entry is not None and entry.used_ns == used_ns:
                return used_ns, path
            heapq.heappop(self._by_use)
        return None

    def _enter(self, path: str, entry: PageEntry) -> None:
        """Under the lock."""
        self._entries[path] = entry
        heapq.heappush(self._by_use, (entry.used_ns, path))

    def _remove(self, path: str, reason: str) -> None:
        try:
            os.unlink(self._root / path)
        except FileNotFoundError:  # another server removed it
            pass
        except OSError as error:
            self._warn("remove", f"{self._root / path} cannot be removed: {error.strerror}", remedy="")
        self._forget(path)
        self._count_one(f"removed_{reason}")

    def _forget(self, path: str) -> None:
        with self._lock:
            self._drop(path)

    def _drop(self, path: str) -> None:
        """Under the lock."""
        entry = self._entries.pop(path, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
            self.num_pages -= self._is_own(path)

    def _is_own(self, path: str) -> bool:
        return path.startswith(f"{self._files.key}/")

    def _count_one(self, name: str, count: int = 1) -> None:
        with self._lock:
            self.counters[name] += count

    def _warn(self, what: str, message: str, remedy: str = "; prompts are computed instead") -> None:
        """Warn once for each kind of trouble."""
        with self._lock:
            is_new = what not in self._warned
            self._warned.add(what)
        if is_new:
            log.warning("cache_folder: %s%s", message, remedy)


def _make(folder: Path) -> None:
    """Make a folder and the one that it is in for this user alone."""
    for one in (folder.parent, folder):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)


def _contents(path: Path, num_bytes: int) -> memoryview:
    """The file, or its beginning where it is longer than it may be."""
    with open_regular(path, follows_links=False) as file:
        contents = bytearray(num_bytes + 1)
        return memoryview(contents)[: file.readinto(contents)]


def _write(path: Path, parts: Iterable[bytes | memoryview], used_ns: int) -> None:
    # Not synced: after a loss of power a file may be anything, which its checksum tells.
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:  # the folder was removed
        _make(path.parent)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(number, "wb", buffering=0) as file:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[file.write(left) :]
        os.utime(file.fileno(), ns=(used_ns, used_ns))
