"""The tables of kept responses."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator

from quire.errors import InvalidSetting

MEMORY = ":memory:"
BUSY_S = 10.0  # another process writes meanwhile
_APPLICATION = 0x71726573
_VERSION = 2

# Every key begins with the owner, so that no search meets what others keep, whatever ids they chose.
# No table is WITHOUT ROWID: SQLite would read whole rows, of megabytes, to compare keys. Large columns come last.
_TABLES = """
CREATE TABLE owners (
    number INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL,
    num_responses INTEGER NOT NULL DEFAULT 0, num_bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX by_responses ON owners (num_responses);
CREATE INDEX by_bytes ON owners (num_bytes);
CREATE TABLE responses (
    number INTEGER PRIMARY KEY, owner INTEGER NOT NULL, id TEXT NOT NULL, previous TEXT, num_bytes INTEGER NOT NULL,
    used INTEGER NOT NULL, runner TEXT, head BLOB NOT NULL, UNIQUE (owner, id)
);
CREATE INDEX by_use ON responses (used) WHERE runner IS NULL;
CREATE INDEX by_owner_and_use ON responses (owner, used) WHERE runner IS NULL;
CREATE INDEX by_runner ON responses (runner) WHERE runner IS NOT NULL;
CREATE TABLE items (
    response INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE, is_output INTEGER NOT NULL,
    position INTEGER NOT NULL, owner INTEGER NOT NULL, id TEXT NOT NULL, item BLOB NOT NULL,
    PRIMARY KEY (response, is_output, position)
);
CREATE INDEX by_id ON items (owner, id);
CREATE TABLE totals (
    number INTEGER PRIMARY KEY, num_responses INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    boot_id TEXT NOT NULL, clock_offset INTEGER NOT NULL
);
INSERT INTO totals VALUES (1, 0, 0, '', 0);
CREATE TRIGGER added AFTER INSERT ON responses BEGIN
    UPDATE totals SET num_responses = num_responses + 1, num_bytes = num_bytes + new.num_bytes WHERE number = 1;
    UPDATE owners SET num_responses = num_responses + 1, num_bytes = num_bytes + new.num_bytes
        WHERE number = new.owner;
END;
CREATE TRIGGER changed AFTER UPDATE OF num_bytes ON responses BEGIN
    UPDATE totals SET num_bytes = num_bytes + new.num_bytes - old.num_bytes WHERE number = 1;
    UPDATE owners SET num_bytes = num_bytes + new.num_bytes - old.num_bytes WHERE number = new.owner;
END;
CREATE TRIGGER removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET num_responses = num_responses - 1, num_bytes = num_bytes - old.num_bytes WHERE number = 1;
    UPDATE owners SET num_responses = num_responses - 1, num_bytes = num_bytes - old.num_bytes
        WHERE number = old.owner;
    DELETE FROM owners WHERE number = old.owner AND num_responses = 0;
END;
"""

# A file of the first version. Its processes have ended, so that what they ran is lost.
_SET_ASIDE = """
DROP TRIGGER IF EXISTS added;
DROP TRIGGER IF EXISTS changed;
DROP TRIGGER IF EXISTS removed;
DROP TABLE totals;
DROP INDEX IF EXISTS by_use;
DROP INDEX IF EXISTS by_id;
ALTER TABLE responses RENAME TO first_responses;
ALTER TABLE items RENAME TO first_items;
"""
_TAKE_OVER = """
INSERT INTO owners (name) SELECT DISTINCT owner FROM first_responses;
INSERT INTO responses (owner, id, previous, num_bytes, used, runner, head)
    SELECT number, id, previous, first_responses.num_bytes, used, CASE WHEN is_running THEN '' END, head
    FROM first_responses JOIN owners ON name = owner;
INSERT INTO items SELECT number, is_output, position, owner, first_items.id, item
    FROM first_items JOIN responses ON responses.id = first_items.response;
DROP TABLE first_items;
DROP TABLE first_responses;
"""


def open_tables(path: str) -> sqlite3.Connection:
    """A connection to the file, which has the tables. Raises InvalidSetting where it cannot be used."""
    try:
        if path != MEMORY:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # only this user can read it
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        raise InvalidSetting(f"response_store is {path!r}; it cannot be used: {error}") from error
    return connection


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    run = connection.execute
    run("PRAGMA foreign_keys = ON")
    run("PRAGMA secure_delete = ON")  # deleted text is not left in the file

    def check_kind() -> None:
        with reading(connection):
            _version(connection, path)

    _when_free(check_kind)  # before any change: a file of something else is left as it is
    if path != MEMORY:
        _when_free(lambda: run("PRAGMA journal_mode = WAL"))
        run("PRAGMA synchronous = NORMAL")
        _check(connection, path)
    with writing(connection):  # of several processes one makes the tables
        version = _version(connection, path)
        if version == _VERSION:
            return
        for statement in _statements(_SET_ASIDE + _TABLES + _TAKE_OVER if version else _TABLES):
            run(statement)
        run(f"PRAGMA application_id = {_APPLICATION}")
        run(f"PRAGMA user_version = {_VERSION}")


def _version(connection: sqlite3.Connection, path: str) -> int:
    """The version of the tables; 0 where there are none. Raises InvalidSetting where there is something else."""
    names = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    application, version, num_tables = (connection.execute(name).fetchone()[0] for name in names)
    if (application, version) in ((_APPLICATION, 1), (_APPLICATION, _VERSION)):
        return int(version)
    if num_tables:
        raise InvalidSetting(f"response_store is {path!r}, which holds something else, or another version of it")
    return 0


def _check(connection: sqlite3.Connection, path: str) -> None:
    try:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_CORRUPT:
            raise
        found = str(error)
    if found != "ok":
        raise InvalidSetting(f"response_store is {path!r}, which is damaged: {found}; move it away or restore it")


@contextlib.contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction. It takes the lock of writers at its beginning: a reader that becomes a writer can be refused."""
    with _transaction(connection, "BEGIN IMMEDIATE"):
        yield


@contextlib.contextmanager
def reading(connection: sqlite3.Connection) -> Iterator[None]:
    """Several reads of one state, whatever other processes write meanwhile."""
    with _transaction(connection, "BEGIN"):
        yield


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk may have ended it
            connection.execute("ROLLBACK")
        raise


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
