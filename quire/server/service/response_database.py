"""Kept responses in a SQLite database, in memory or in a file that several processes share."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from quire.errors import InvalidSetting

MEMORY = ":memory:"
Clock = Callable[[], int]  # nanoseconds
BUSY_S = 10.0  # another process writes meanwhile
MAX_CHAIN_BYTES = 4 * 2**20  # of a conversation that is read: more than the largest context
MAX_CHAIN_ITEMS = 16_384
MAX_REFERRED_BYTES = MAX_CHAIN_BYTES  # of kept items that one request names
LOST_AFTER_S = 30.0  # a running response that its process does not mention any more
_APPLICATION = 0x71726573
_VERSION = 1

# No table is WITHOUT ROWID: SQLite would read whole rows, of megabytes, to compare keys. Large columns come last.
_TABLES = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY NOT NULL, owner TEXT NOT NULL, previous TEXT, num_bytes INTEGER NOT NULL,
    used INTEGER NOT NULL, is_running INTEGER NOT NULL, head BLOB NOT NULL
);
CREATE INDEX by_use ON responses (used);
CREATE TABLE items (
    response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE, is_output INTEGER NOT NULL,
    position INTEGER NOT NULL, id TEXT NOT NULL, item BLOB NOT NULL, PRIMARY KEY (response, is_output, position)
);
CREATE INDEX by_id ON items (id);
CREATE TABLE totals (num_responses INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER added AFTER INSERT ON responses BEGIN
    UPDATE totals SET num_responses = num_responses + 1, num_bytes = num_bytes + new.num_bytes;
END;
CREATE TRIGGER changed AFTER UPDATE OF num_bytes ON responses BEGIN
    UPDATE totals SET num_bytes = num_bytes + new.num_bytes - old.num_bytes;
END;
CREATE TRIGGER removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET num_responses = num_responses - 1, num_bytes = num_bytes - old.num_bytes;
END;
"""
# The response and those before it, the latest first.
_CHAIN = """
WITH RECURSIVE chain (id, previous, depth, is_running) AS (
    SELECT id, previous, 0, is_running FROM responses WHERE id = ? AND owner = ?
    UNION ALL
    SELECT r.id, r.previous, depth + 1, r.is_running FROM chain JOIN responses r ON r.id = chain.previous
)
SELECT id, previous, depth, is_running FROM chain ORDER BY depth
"""


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
        return len(self.head) + sum(len(item.id) + len(item.json) for item in (*self.input, *self.output))


class Chain(NamedTuple):
    """The items of a conversation, the earliest first."""

    items: list[bytes]
    missing: str | None = None  # a response of it that is not kept any more
    is_running: bool = False  # so its output is not there
    is_cut: bool = False  # more came before; there was no room for it


class ResponseDatabase:
    """Holds at most `max_responses` of at most `max_bytes` together, each for `ttl_s` after its last use. The responses
    that were used least recently go first, and none before a later one of its conversation. A response is visible to
    its owner only.

    Used by one thread.
    """

    def __init__(
        self, path: str, max_responses: int, max_bytes: int, ttl_s: float, clock: Clock = time.time_ns
    ) -> None:
        self._now = clock
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_ns = int(ttl_s * 1e9)
        try:
            if path != MEMORY:
                _create(path)
            self._connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._prepare(path)
        except (OSError, sqlite3.Error) as error:
            raise InvalidSetting(f"response_store is {path!r}; it cannot be used: {error}") from error

    def _prepare(self, path: str) -> None:
        run = self._connection.execute
        run("PRAGMA foreign_keys = ON")
        run("PRAGMA secure_delete = ON")  # deleted text is not left in the file
        if path != MEMORY:
            _when_free(lambda: run("PRAGMA journal_mode = WAL"))
            run("PRAGMA synchronous = NORMAL")
        run("BEGIN IMMEDIATE")  # of several processes one makes the tables
        try:
            (application,), (version,) = run("PRAGMA application_id").fetchone(), run("PRAGMA user_version").fetchone()
            if (application, version) == (_APPLICATION, _VERSION):
                return
            if run("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise InvalidSetting(
                    f"response_store is {path!r}, which holds something else, or another version of it"
                )
            for statement in _statements(_TABLES):
                run(statement)
            run(f"PRAGMA application_id = {_APPLICATION}")
            run(f"PRAGMA user_version = {_VERSION}")
        finally:
            run("COMMIT")

    def close(self) -> None:
        self._connection.close()

    def add(self, owner: str, response: KeptResponse) -> bool:
        """False where it is larger than everything that may be kept."""
        if not self._max_responses or response.num_bytes > self._max_bytes:
            return False
        run = self._connection.execute
        with self._transaction():
            run(
                "INSERT INTO responses (id, owner, previous, num_bytes, used, is_running, head) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (response.id, owner, response.previous, response.num_bytes, self._now(), response.is_running,
                 response.head),
            )  # fmt: skip
            self._add_items(response.id, response.input, is_output=False)
            self._add_items(response.id, response.output, is_output=True)
            self._evict()
        return True

    def finish(self, response: KeptResponse) -> bool:
        """Replace a running response. False where it was cancelled or deleted meanwhile."""
        run = self._connection.execute
        with self._transaction():
            changed = run(
                "UPDATE responses SET head = ?, num_bytes = ?, used = ?, is_running = 0 WHERE id = ? AND is_running",
                (response.head, response.num_bytes, self._now(), response.id),
            ).rowcount
            if changed:
                self._add_items(response.id, response.output, is_output=True)
                self._evict()
        return bool(changed)

    def mention(self, ids: Sequence[str]) -> set[str]:
        """Note that these are still running. Returns those that are not to go on: cancelled or deleted."""
        now, statement = self._now(), "UPDATE responses SET used = ? WHERE id = ? AND is_running"
        with self._transaction():
            is_running = [self._connection.execute(statement, (now, one)).rowcount for one in ids]
        return {one for one, found in zip(ids, is_running, strict=True) if not found}

    def get(self, owner: str, response_id: str) -> KeptResponse | None:
        """The response without its input. It has failed if its process is gone."""
        self._expire()
        found = self._connection.execute(
            "SELECT previous, head, used, is_running FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
        ).fetchone()
        if found is None:
            return None
        previous, head, used, is_running = found
        if is_running and self._now() - used > LOST_AFTER_S * 1e9:
            error = {"code": "server_error", "message": "the process that worked on this response has ended"}
            head, is_running = self._end(response_id, head, {"status": "failed", "error": error}), False
        output = [Item(*row) for row in self._items(response_id, is_output=True)]
        return KeptResponse(response_id, previous, head, (), output, bool(is_running))

    def cancel(self, response_id: str, head: bytes) -> None:
        self._end(response_id, head, {"status": "cancelled"})

    def _end(self, response_id: str, head: bytes, changes: dict[str, object]) -> bytes:
        ended = msgspec.json.encode(msgspec.json.decode(head) | changes)
        self._connection.execute(
            "UPDATE responses SET head = ?, is_running = 0 WHERE id = ? AND is_running", (ended, response_id)
        )
        return ended

    def delete(self, owner: str, response_id: str) -> bool:
        run = self._connection.execute
        found = run("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)).rowcount
        if found:
            run("PRAGMA wal_checkpoint(TRUNCATE)")  # the log of changes has the text, too
        return bool(found)

    def chain(self, owner: str, response_id: str) -> Chain | None:
        """The conversation up to a response and with its output, which counts as used now. None where the response is
        not kept."""
        self._expire()
        run, now = self._connection.execute, self._now()
        links = run(_CHAIN, (response_id, owner)).fetchall()
        if not links:
            return None
        if links[0][3]:
            return Chain([], is_running=True)
        parts: list[list[bytes]] = []
        num_bytes = num_items = 0
        for one, *_ in links:
            rows = [*self._items(one, is_output=False), *self._items(one, is_output=True)]
            num_items += len(rows)
            num_bytes += sum(len(item) for _, item in rows)
            if num_bytes > MAX_CHAIN_BYTES or num_items > MAX_CHAIN_ITEMS:
                return Chain(_joined(parts), is_cut=True)
            parts.append([item for _, item in rows])
        with self._transaction():  # an earlier response is used later, so that it outlives those that need it
            self._connection.executemany(
                "UPDATE responses SET used = ? WHERE id = ?", [(now + depth, one) for one, _, depth, _ in links]
            )
        return Chain(_joined(parts), links[-1][1])

    def find(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        """The kept items with these ids, up to the first that goes beyond `MAX_REFERRED_BYTES`."""
        found: dict[str, bytes] = {}
        num_bytes = 0
        for item_id in item_ids:
            row = self._connection.execute(
                "SELECT item FROM items JOIN responses ON responses.id = response WHERE items.id = ? AND owner = ?",
                (item_id, owner),
            ).fetchone()
            if row is not None:
                found[item_id] = row[0]
                num_bytes += len(row[0])
                if num_bytes > MAX_REFERRED_BYTES:
                    break
        return found

    def input_items(self, owner: str, response_id: str) -> list[Item] | None:
        """The items; None if the response is not kept."""
        if self.get(owner, response_id) is None:
            return None
        return [Item(*row) for row in self._items(response_id, is_output=False)]

    def _items(self, response_id: str, *, is_output: bool) -> list[tuple[str, bytes]]:
        query = "SELECT id, item FROM items WHERE response = ? AND is_output = ? ORDER BY position"
        return self._connection.execute(query, (response_id, is_output)).fetchall()

    def _add_items(self, response_id: str, items: Sequence[Item], *, is_output: bool) -> None:
        rows = [(response_id, is_output, position, *item) for position, item in enumerate(items)]
        self._connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", rows)

    def _expire(self) -> None:
        run, oldest = self._connection.execute, self._now() - self._ttl_ns
        if run("SELECT 1 FROM responses WHERE used < ? LIMIT 1", (oldest,)).fetchone():  # deleting takes a lock
            run("DELETE FROM responses WHERE used < ?", (oldest,))

    def _evict(self) -> None:
        self._expire()
        run = self._connection.execute
        while True:
            num_responses, num_bytes = run("SELECT * FROM totals").fetchone()
            if num_responses <= self._max_responses and num_bytes <= self._max_bytes:
                return
            run("DELETE FROM responses WHERE id = (SELECT id FROM responses ORDER BY used LIMIT 1)")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Takes the lock of writers at its beginning: a reader that becomes a writer can be refused."""
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        try:
            yield
            run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have ended it
                run("ROLLBACK")
            raise


def _joined(parts: list[list[bytes]]) -> list[bytes]:
    return [item for part in reversed(parts) for item in part]


def _create(path: str) -> None:
    """Make an empty file that only this user can read."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _when_free(change: Callable[[], object]) -> None:
    """A new file that several processes open at once is locked for all of them, and SQLite waits for that in some
    changes only."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            change()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _statements(script: str) -> list[str]:
    """The statements of a script, those of triggers in one."""
    statements, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return statements
