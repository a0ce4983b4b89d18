"""Kept responses: their bounds, their owners and their conversations."""

import json
import resource
import sqlite3
import stat
import subprocess
import sys

import pytest

from quire.errors import InvalidSetting
from quire.server.service.response_database import (
    MAX_CHAIN_ITEMS,
    MAX_REFERRED_BYTES,
    MEMORY,
    Item,
    KeptResponse,
    ResponseDatabase,
)


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now_ns = 10**18

    def time_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(clock):
    def make(path=MEMORY, max_responses=100, max_bytes=10**6, ttl_s=60.0):
        return ResponseDatabase(str(path), max_responses, max_bytes, ttl_s, clock.time_ns)

    return make


def response(name: str, previous: str | None = None, *, size: int = 0, is_running: bool = False) -> KeptResponse:
    head = json.dumps({"id": name, "status": "in_progress" if is_running else "completed", "fill": "x" * size}).encode()
    given = [Item(f"{name}-in", json.dumps({"text": f"{name} asks"}).encode())]
    answered = [] if is_running else [Item(f"{name}-out", json.dumps({"text": f"{name} answers"}).encode())]
    return KeptResponse(name, previous, head, given, answered, is_running)


def texts(chain) -> list[str]:
    return [json.loads(item)["text"] for item in chain.items]


def test_a_response_is_found_again_with_its_output_and_its_input(make):
    database = make()
    assert database.add("ada", response("a"))
    body = json.loads(database.get("ada", "a").body)
    assert body == {"id": "a", "status": "completed", "fill": "", "output": [{"text": "a answers"}]}
    assert [item.id for item in database.input_items("ada", "a")] == ["a-in"]
    assert database.find("ada", ["a-in", "a-out", "b"]).keys() == {"a-in", "a-out"}


def test_nothing_of_one_owner_is_seen_or_deleted_by_another(make):
    database = make()
    database.add("ada", response("a"))
    assert database.get("bob", "a") is None
    assert database.chain("bob", "a") is None
    assert database.input_items("bob", "a") is None
    assert database.find("bob", ["a-in", "a-out"]) == {}
    assert not database.delete("bob", "a")
    assert database.delete("ada", "a")
    assert database.get("ada", "a") is None
    assert database.find("ada", ["a-in", "a-out"]) == {}


def test_a_conversation_has_the_items_of_all_its_responses_in_order(make):
    database = make()
    database.add("", response("a"))
    database.add("", response("b", "a"))
    database.add("", response("other", "a"))
    database.add("", response("c", "b"))
    assert texts(database.chain("", "c")) == ["a asks", "a answers", "b asks", "b answers", "c asks", "c answers"]
    assert database.chain("", "c").missing is None


def test_a_conversation_says_which_response_of_it_was_deleted(make):
    database = make()
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        database.add("", response(name, previous))
    database.delete("", "b")
    assert database.chain("", "c").missing == "b"


def test_of_too_many_responses_those_unused_for_longest_go_and_conversations_go_from_their_ends(make):
    database = make(max_responses=4)
    for name, previous in (("a", None), ("b", "a"), ("x", None), ("y", None)):
        database.add("", response(name, previous))
    database.chain("", "b")  # uses a and b
    database.add("", response("z"))
    assert [name for name in "abxyz" if database.get("", name)] == ["a", "b", "y", "z"]
    database.chain("", "b")
    database.add("", response("p"))
    database.add("", response("q"))
    database.add("", response("r"))
    assert [name for name in "abpqr" if database.get("", name)] == ["a", "p", "q", "r"]  # b, which needs a, went first


def test_of_too_many_bytes_those_unused_for_longest_go(make):
    database = make(max_bytes=3000)
    for name in "abcd":
        assert database.add("", response(name, size=900))
    assert [name for name in "abcd" if database.get("", name)] == ["b", "c", "d"]
    assert not database.add("", response("e", size=3000))  # it alone is too much, and drives out nothing
    assert [name for name in "abcde" if database.get("", name)] == ["b", "c", "d"]


def test_the_bounds_count_what_finishing_and_deleting_change(make):
    database = make(max_bytes=3000)
    database.add("", response("a", is_running=True))
    assert database.finish(response("a", size=2500))
    database.delete("", "a")
    for name in "bcd":
        database.add("", response(name, size=850))
    assert [name for name in "bcd" if database.get("", name)] == ["b", "c", "d"]


def test_a_response_expires_after_its_last_use(make, clock):
    database = make(ttl_s=60)
    database.add("", response("a"))
    database.add("", response("b"))
    clock.now_ns += 50 * 10**9
    database.chain("", "a")
    clock.now_ns += 50 * 10**9
    assert database.get("", "a") is not None
    assert database.get("", "b") is None


def test_a_running_response_is_finished_once_and_not_after_it_was_cancelled(make):
    database = make()
    database.add("", response("a", is_running=True))
    assert database.chain("", "a").is_running
    assert database.mention(["a"]) == set()
    assert database.finish(response("a"))
    assert not database.finish(response("a"))
    assert texts(database.chain("", "a")) == ["a asks", "a answers"]
    database.add("", response("b", is_running=True))
    database.cancel("b", database.get("", "b").head)
    assert database.mention(["b", "gone"]) == {"b", "gone"}
    assert not database.finish(response("b"))
    assert json.loads(database.get("", "b").body)["status"] == "cancelled"


def test_a_running_response_that_is_mentioned_no_more_has_failed(make, clock):
    database = make(ttl_s=3600)
    database.add("", response("a", is_running=True))
    clock.now_ns += 25 * 10**9
    database.mention(["a"])
    clock.now_ns += 25 * 10**9
    assert json.loads(database.get("", "a").body)["status"] == "in_progress"
    clock.now_ns += 25 * 10**9
    failed = json.loads(database.get("", "a").body)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert not database.get("", "a").is_running


def test_a_conversation_longer_than_is_read_is_cut_at_its_beginning(make):
    database = make(max_bytes=10**8)
    database.add("", response("a"))
    database.add("", response("b", "a"))
    many = [Item(str(number), b'{"text":"b asks"}') for number in range(MAX_CHAIN_ITEMS - 3)]
    database.add("", response("c", "b")._replace(input=many))
    chain = database.chain("", "c")
    assert chain.is_cut
    assert texts(chain) == ["b asks", "b answers"] + ["b asks"] * len(many) + ["c answers"]
    assert not database.chain("", "b").is_cut


def test_a_file_is_shared_and_outlives_its_process_and_only_its_user_reads_it(make, tmp_path):
    path = tmp_path / "responses.sqlite"
    first, second = make(path), make(path)
    first.add("", response("a"))
    assert second.get("", "a") is not None
    second.delete("", "a")
    assert first.get("", "a") is None
    first.add("", response("b"))
    first.close()
    second.close()
    assert make(path).get("", "b") is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


OPEN_AT_ONCE = """
import os, sys, time
from quire.server.service.response_database import ResponseDatabase
for number in range(40):
    begun, children = time.time() + 0.005, []
    for _ in range(6):
        children.append(os.fork())
        if not children[-1]:
            while time.time() < begun:
                pass
            ResponseDatabase(f"{sys.argv[1]}/{number}.sqlite", 10, 10_000, 60).close()
            os._exit(0)
    assert not any(os.waitpid(child, 0)[1] for child in children)
"""


def test_processes_that_open_a_new_file_at_once_share_it(tmp_path):
    """One of forty times, SQLite says that it is locked."""
    command = [sys.executable, "-c", OPEN_AT_ONCE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_that_holds_something_else_is_refused_and_left_alone(make, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("these are notes, not a database, and they are long enough to be looked at" * 20)
    with pytest.raises(InvalidSetting, match=r"response_store is .*notes\.txt"):
        make(text)
    assert text.read_text().startswith("these are notes")
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE mine (a)")
    with pytest.raises(InvalidSetting, match="holds something else"):
        make(other)
    with pytest.raises(InvalidSetting, match="cannot be used"):
        make(tmp_path / "no" / "folder")


def test_deleted_text_is_not_left_in_the_file(make, tmp_path):
    path = tmp_path / "responses.sqlite"
    database = make(path)
    database.add("", KeptResponse("a", None, b"{}", [Item("i", b'"the launch code"')]))
    database.delete("", "a")
    assert database.get("", "b") is None
    files = [one.read_bytes() for one in tmp_path.iterdir()]
    assert len(files) > 1  # the log of changes is one of them
    assert not any(b"launch code" in one for one in files)


def test_a_store_without_room_says_so_and_works_again_once_there_is_some(make, tmp_path):
    database = make(tmp_path / "responses", max_bytes=10**9)
    database.add("ada", response("a"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        for name, size in (("b", 300_000), ("c", 30_000_000)):  # the larger is written before its transaction ends
            with pytest.raises(sqlite3.OperationalError, match="disk"):
                database.add("ada", response(name, size=size))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert database.get("ada", "b") is None
    assert database.add("ada", response("d"))
    assert database.get("ada", "d") is not None


def test_items_that_are_referred_to_are_read_up_to_a_limit(make):
    database = make(max_bytes=10**9)
    items = [Item(f"item_{number}", b'"%b"' % (b"x" * (MAX_REFERRED_BYTES // 3))) for number in range(6)]
    database.add("ada", KeptResponse("a", None, b"{}", items))
    assert len(database.find("ada", [item.id for item in items])) == 3


def test_keys_are_compared_without_reading_what_is_kept_under_them(make, tmp_path):
    """Otherwise a few large responses make thousands of small items take minutes."""
    make(tmp_path / "responses")
    tables = sqlite3.connect(tmp_path / "responses").execute("PRAGMA table_list").fetchall()
    kept = {name: without_rowid for _, name, kind, _, without_rowid, _ in tables if kind == "table"}
    assert kept.keys() >= {"responses", "items"}
    assert not any(kept.values())


def test_a_file_of_the_first_form_is_still_used(make, tmp_path):
    """Its columns have another order."""
    path = tmp_path / "responses"
    make(path).close()
    old = sqlite3.connect(path)
    old.executescript("DROP TABLE responses")
    columns = "id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, head BLOB NOT NULL, num_bytes INTEGER NOT NULL,"
    old.executescript(
        f"CREATE TABLE responses ({columns} used INTEGER NOT NULL, is_running INTEGER NOT NULL) WITHOUT ROWID"
    )
    old.close()
    database = make(path)
    assert database.add("ada", response("a"))
    assert json.loads(database.get("ada", "a").body)["status"] == "completed"
