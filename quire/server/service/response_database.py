"""Kept responses in a SQLite database, in memory or in a file that several processes share."""

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from quire.errors import InvalidRequest, InvalidSetting, Overloaded
from quire.server.service.response_runners import ResponseRunners
from quire.server.service.response_tables import BUSY_S, open_tables, reading, writing
from quire.server.service.store_clock import Clocks, StoreClock

MAX_CHAIN_BYTES = 4 * 2**20  # of a conversation that is read: more than the largest context
MAX_ITEMS = 16_384  # of a conversation that is read, and of one request
MAX_REFERRED_BYTES = MAX_CHAIN_BYTES  # of kept items that one request names
RESPONSE_BYTES, ITEM_BYTES = 256, 64  # in tables and indexes, beside text and ids
NUM_EXPIRED_AT_ONCE = 64  # so that no reader waits for the removal of thousands
LOST_INTERVAL_S = 60.0  # between searches for what ended processes ran
RETRY_S = 1.0
LOST: dict[str, object] = {
    "status": "failed",
    "error": {"code": "server_error", "message": "the process that worked on this response has ended"},
}
_OWNER = "(SELECT number FROM owners WHERE name = ?)"


class Item(NamedTuple):
    id: str
    json: bytes


class KeptResponse(NamedTuple):
    """A response in JSON: `head` is the object without its output."""

    id: str
    previous: str | None
    head: bytes
    input: Sequence[Item] = ()
    output: Sequence[Item] = ()
    is_running: bool = False

    @property
    def body(self) -> bytes:
        return self.head[:-1] + b',"output":[' + b",".join(item.json for item in self.output) + b"]}"

    @property
    def num_bytes(self) -> int:
        """The room that it takes. An id of an item stands in an index, too."""
        items = sum(ITEM_BYTES + 2 * len(item.id) + len(item.json) for item in (*self.input, *self.output))
        return RESPONSE_BYTES + len(self.head) + items


class Chain(NamedTuple):
    """The items of a conversation, the earliest first."""

    items: list[bytes]
    missing: str | None = None  # a response of it that is not kept any more
    is_running: bool = False  # so its output is not there
    is_cut: bool = False  # more came before; there was no room for it


class ResponseDatabase:
    """Holds at most `max_responses` of at most `max_bytes` together, each for `ttl_s` after its last use. Beyond, the
    owner that has most loses the responses that it used least recently, and none before a later one of its
    conversation. A response is visible to its owner only. One that runs stays until it ends.

    `trouble` is the error for which something could not be written, until a response is kept again. Used by one thread.
    """

    def __init__(
        self, path: str, max_responses: int, max_bytes: int, ttl_s: float, clocks: Clocks | None = None
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_ns = int(ttl_s * 1e9)
        self.trouble: sqlite3.Error | None = None
        self._clock = StoreClock.begun(clocks or Clocks())
        self._connection = open_tables(path)
        try:
            self._runners = ResponseRunners(path)
            self._try(self._join_clock)
            self._fail_lost()
        except (OSError, sqlite3.Error) as error:
            self._connection.close()
            raise InvalidSetting(f"response_store is {path!r}; it cannot be used: {error}") from error

    def _join_clock(self) -> None:
        """Go by the clock of the processes that use the file already."""
        run = self._connection.execute
        boot_id, offset_ns = run("SELECT boot_id, clock_offset FROM totals WHERE number = 1").fetchone()
        latest = run("SELECT used FROM responses WHERE runner IS NULL ORDER BY used DESC LIMIT 1").fetchone() or (0,)
        if not self._clock.join(boot_id, offset_ns, latest[0]):
            change = "UPDATE totals SET boot_id = ?, clock_offset = ? WHERE number = 1"
            run(change, (self._clock.boot_id, self._clock.offset_ns))

    def close(self) -> None:
        self._connection.close()
        self._runners.leave()

    @property
    def runner(self) -> str:
        """This process, as the database names it."""
        return self._runners.own

    # Writers

    def add(self, owner: str, response: KeptResponse) -> None:
        """Raises where there is no room for it."""
        self._check_size(response)
        run = self._connection.execute
        with self._changing():
            run("INSERT INTO owners (name) VALUES (?) ON CONFLICT DO NOTHING", (owner,))
            number = run(
                "INSERT INTO responses (owner, id, previous, num_bytes, used, runner, head) "
                f"VALUES ({_OWNER}, ?, ?, ?, ?, ?, ?)",
                (owner, response.id, response.previous, response.num_bytes, self._clock.now_ns(),
                 self.runner if response.is_running else None, response.head),
            ).lastrowid  # fmt: skip
            self._add_items(number, response.input, is_output=False)
            self._add_items(number, response.output, is_output=True)
            self._use(owner, response.id)
            self._expire()
            self._make_room(owner, number)
        self.trouble = None

    def finish(self, owner: str, response: KeptResponse) -> None:
        """Replace a running response, unless it was cancelled or deleted meanwhile. Raises where there is no room."""
        self._check_size(response)
        with self._changing():
            number = self._ended(owner, response.id, response.head, response.num_bytes)
            if number is not None:
                self._add_items(number, response.output, is_output=True)
                self._use(owner, response.id)
                self._make_room(owner, number)
        self.trouble = None

    def _check_size(self, response: KeptResponse) -> None:
        if response.num_bytes > self._max_bytes:
            problem = f"the response takes {response.num_bytes} bytes; the limit is {self._max_bytes}"
            raise InvalidRequest(f"{problem}, --max-stored-bytes")

    def fail(self, owner: str, response_id: str, message: str) -> None:
        """End a running response that has no answer."""
        error = {"code": "server_error", "message": message}
        self._end(owner, response_id, {"status": "failed", "error": error})

    def cancel(self, owner: str, response_id: str) -> None:
        self._end(owner, response_id, {"status": "cancelled"})

    def _end(self, owner: str, response_id: str, changes: dict[str, object]) -> None:
        with self._changing():
            found = self._row(owner, response_id)
            if found is not None and found.runner is not None:
                self._ended(owner, response_id, _changed(self._head(found.number), changes))

    def delete(self, owner: str, response_id: str) -> bool:
        run = self._connection.execute
        with self._changing():
            found = run(f"DELETE FROM responses WHERE owner = {_OWNER} AND id = ?", (owner, response_id)).rowcount
        if found:
            run("PRAGMA wal_checkpoint(TRUNCATE)")  # the log of changes has the text, too
        return bool(found)

    # Readers. The use of a response is noted, and others expire, where that can be written

    def get(self, owner: str, response_id: str) -> KeptResponse | None:
        """The response without its input. It has failed if its process is gone."""
        self._tidy()
        found, runner = self._read(owner, response_id)
        if found is None or runner is None or not self._runners.has_ended(runner):
            return found
        lost = [runner]
        self._try(lambda: self._end_those_of(lost))
        found, runner = self._read(owner, response_id)  # the last that the process did was to finish it, perhaps
        if found is None or runner is None:
            return found
        return found._replace(head=_changed(found.head, LOST), is_running=False)

    def _read(self, owner: str, response_id: str) -> tuple[KeptResponse | None, str | None]:
        """A response without its input, and the process that runs it."""
        with reading(self._connection):
            found = self._row(owner, response_id)
            if found is None:
                return None, None
            head = self._head(found.number)
            output = [Item(*row) for row in self._items(found.number, is_output=True)]
        is_running = found.runner is not None
        return KeptResponse(response_id, found.previous, head, (), output, is_running), found.runner

    def chain(self, owner: str, response_id: str) -> Chain | None:
        """The conversation up to a response and with its output, which counts as used now. None where the response is
        not kept."""
        self._tidy()
        with reading(self._connection):
            chain = self._read_chain(owner, response_id)
        if chain is not None and not chain.is_running and not chain.is_cut:
            self._try(lambda: self._use(owner, response_id))
        return chain

    def _read_chain(self, owner: str, response_id: str) -> Chain | None:
        parts: list[list[bytes]] = []
        num_bytes = num_items = 0
        one: str | None = response_id
        while one is not None:
            found = self._row(owner, one)
            if found is None:
                return Chain(_joined(parts), missing=one) if parts else None
            if found.runner is not None:
                return Chain([], is_running=True)
            part: list[bytes] = []
            for is_output in (False, True):
                for _, item in self._items(found.number, is_output=is_output):
                    part.append(item)
                    num_bytes += len(item)
                    num_items += 1
                    if num_bytes > MAX_CHAIN_BYTES or num_items > MAX_ITEMS:
                        return Chain(_joined(parts), is_cut=True)
            parts.append(part)
            one = found.previous
            if len(parts) == MAX_ITEMS and one is not None:  # responses to instructions alone have few items
                return Chain(_joined(parts), is_cut=True)
        return Chain(_joined(parts))

    def find(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        """The latest kept items with these ids, up to the first that is not kept or goes beyond
        `MAX_REFERRED_BYTES`."""
        found: dict[str, bytes] = {}
        num_bytes = 0
        with reading(self._connection):
            for item_id in item_ids:
                item = self._find(owner, item_id)
                if item is None:
                    break
                found[item_id] = item
                num_bytes += len(item)
                if num_bytes > MAX_REFERRED_BYTES:
                    break
        return found

    def _find(self, owner: str, item_id: str) -> bytes | None:
        run = self._connection.execute
        query = f"SELECT response, item FROM items WHERE owner = {_OWNER} AND id = ? ORDER BY rowid DESC LIMIT 1"
        row = run(query, (owner, item_id)).fetchone()
        if row is None:
            return None
        response, item = row
        used, runner = run("SELECT used, runner FROM responses WHERE number = ?", (response,)).fetchone()
        return item if runner is not None or used >= self._oldest() else None

    def input_items(self, owner: str, response_id: str) -> list[Item] | None:
        """The items; None if the response is not kept."""
        with reading(self._connection):
            found = self._row(owner, response_id)
            return None if found is None else [Item(*row) for row in self._items(found.number, is_output=False)]

    def _row(self, owner: str, response_id: str) -> "_Row | None":
        query = f"SELECT number, previous, used, runner FROM responses WHERE owner = {_OWNER} AND id = ?"
        row = self._connection.execute(query, (owner, response_id)).fetchone()
        if row is None:
            return None
        found = _Row(*row)
        return found if found.runner is not None or found.used >= self._oldest() else None

    def _head(self, number: int) -> bytes:
        head: bytes = self._connection.execute("SELECT head FROM responses WHERE number = ?", (number,)).fetchone()[0]
        return head

    def _items(self, number: int, *, is_output: bool) -> Iterator[tuple[str, bytes]]:
        query = "SELECT id, item FROM items WHERE response = ? AND is_output = ? ORDER BY position"
        return self._connection.execute(query, (number, is_output))

    # Changes within a transaction

    def _add_items(self, number: int | None, items: Sequence[Item], *, is_output: bool) -> None:
        (owner,) = self._connection.execute("SELECT owner FROM responses WHERE number = ?", (number,)).fetchone()
        rows = [(number, is_output, position, owner, *item) for position, item in enumerate(items)]
        self._connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _ended(self, owner: str, response_id: str, head: bytes, num_bytes: int | None = None) -> int | None:
        """The number of a running response, which ends; None where it does not run."""
        run = self._connection.execute
        query = f"SELECT number, num_bytes FROM responses WHERE owner = {_OWNER} AND id = ? AND runner IS NOT NULL"
        row = run(query, (owner, response_id)).fetchone()
        if row is None:
            return None
        number: int = row[0]
        change = "UPDATE responses SET head = ?, num_bytes = ?, used = ?, runner = NULL WHERE number = ?"
        run(change, (head, row[1] if num_bytes is None else num_bytes, self._clock.now_ns(), number))
        return number

    def _use(self, owner: str, response_id: str) -> None:
        """Note that a conversation is used. An earlier response is used later, so that it outlives those that need
        it."""
        now, one = self._clock.now_ns(), self._row(owner, response_id)
        for depth in range(MAX_ITEMS):
            if one is None:
                return
            self._connection.execute("UPDATE responses SET used = ? WHERE number = ?", (now + depth, one.number))
            one = None if one.previous is None else self._row(owner, one.previous)

    def _make_room(self, owner: str, number: int | None) -> None:
        """Forget responses until the rest is within the bounds. Raises where there is no room for `number`, of
        `owner`: the others of the owner that has most are running."""
        run = self._connection.execute
        while True:
            totals = "SELECT num_responses, num_bytes FROM totals WHERE number = 1"
            num_responses, num_bytes = run(totals).fetchone()
            if num_responses <= self._max_responses and num_bytes <= self._max_bytes:
                return
            measure = "num_responses" if num_responses > self._max_responses else "num_bytes"
            for most, name in run(f"SELECT number, name FROM owners ORDER BY {measure} DESC"):
                oldest = run(
                    "SELECT number FROM responses WHERE owner = ? AND runner IS NULL AND number != ? "
                    "ORDER BY used LIMIT 1",
                    (most, number),
                ).fetchone()
                if oldest is not None or name == owner:
                    break
            if oldest is None:
                limits = f"{self._max_responses} responses and {self._max_bytes} bytes"
                problem = "the other responses of its owner run, or it is larger than the owner's share"
                raise Overloaded(f"there is no room for the response: {problem} of {limits}", RETRY_S)
            run("DELETE FROM responses WHERE number = ?", oldest)

    def _expire(self) -> None:
        run = self._connection.execute
        query = "SELECT number FROM responses WHERE used < ? AND runner IS NULL ORDER BY used LIMIT ?"
        for number in run(query, (self._oldest(), NUM_EXPIRED_AT_ONCE)).fetchall():
            run("DELETE FROM responses WHERE number = ?", number)

    def _oldest(self) -> int:
        return self._clock.now_ns() - self._ttl_ns

    # Chores

    def _tidy(self) -> None:
        if self._clock.now_ns() - self._looked_for_lost > LOST_INTERVAL_S * 1e9:
            self._fail_lost()
        query = "SELECT 1 FROM responses WHERE used < ? AND runner IS NULL LIMIT 1"
        if self._connection.execute(query, (self._oldest(),)).fetchone():  # deleting takes a lock
            self._try(self._expire)

    def _fail_lost(self) -> None:
        """End what other processes ran when they ended. Otherwise it would stay for ever, unless it is asked for."""
        self._looked_for_lost = self._clock.now_ns()
        self._runners.remove_ended()
        runners = self._connection.execute("SELECT DISTINCT runner FROM responses WHERE runner IS NOT NULL").fetchall()
        lost = [runner for (runner,) in runners if self._runners.has_ended(runner)]
        if lost:
            self._try(lambda: self._end_those_of(lost))

    def _end_those_of(self, lost: list[str]) -> None:
        run = self._connection.execute
        query = "SELECT name, id, head FROM responses JOIN owners ON owners.number = owner WHERE runner = ?"
        for runner in lost:
            for name, response_id, head in run(query, (runner,)).fetchall():
                self._ended(name, response_id, _changed(head, LOST))

    def _try(self, change: Callable[[], object]) -> None:
        """Make a change that can wait: where it cannot be made now, readers get their answers all the same."""
        with contextlib.suppress(sqlite3.OperationalError), self._changing():  # which notes the trouble
            change()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            with writing(self._connection):
                yield
        except sqlite3.Error as error:
            self.trouble = error
            raise


class _Row(NamedTuple):
    number: int
    previous: str | None
    used: int
    runner: str | None


def running_ids(path: str, runner: str) -> set[str]:
    """The responses that a process runs, as the file has them: those that another process cancelled or deleted are not
    there. The connection is its own, so that it waits neither for readers nor for writers."""
    with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
        return {row[0] for row in connection.execute("SELECT id FROM responses WHERE runner = ?", (runner,))}


def _joined(parts: list[list[bytes]]) -> list[bytes]:
    return [item for part in reversed(parts) for item in part]


def _changed(head: bytes, changes: dict[str, object]) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(head) | changes)
