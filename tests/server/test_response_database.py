"""Kept responses: their bounds, their owners and their conversations."""

import json
import resource
import sqlite3
import stat
import subprocess
import sys

import pytest

from quire.errors import InvalidRequest, InvalidSetting, Overloaded
from quire.server.service.response_database import (
    ITEM_BYTES,
    LOST_INTERVAL_S,
    MAX_ITEMS,
    MAX_REFERRED_BYTES,
    NUM_EXPIRED_AT_ONCE,
    RESPONSE_BYTES,
    Item,
    KeptResponse,
    ResponseDatabase,
    running_ids,
)
from quire.server.service.response_tables import MEMORY
from quire.server.service.store_clock import Clocks

HOUR_NS = 3600 * 10**9


class Machine:
    """The clocks of a machine, which tests move."""

    def __init__(self) -> None:
        self.wall_ns = 10**18
        self.since_boot_ns = 10**12
        self.boot = "first"

    def pass_s(self, seconds: float) -> None:
        self.wall_ns += int(seconds * 1e9)
        self.since_boot_ns += int(seconds * 1e9)

    def since_boot(self) -> int:
        self.pass_s(1e-6)
        return self.since_boot_ns

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.wall_ns, self.since_boot, lambda: self.boot)


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def make(machine):
    def make(path=MEMORY, max_responses=100, max_bytes=10**6, ttl_s=60.0):
        return ResponseDatabase(str(path), max_responses, max_bytes, ttl_s, machine.clocks)

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
    database.add("ada", response("a"))
    body = json.loads(database.get("ada", "a").body)
    assert body == {"id": "a", "status": "completed", "fill": "", "output": [{"text": "a answers"}]}
    assert [item.id for item in database.input_items("ada", "a")] == ["a-in"]
    assert database.find("ada", ["a-in", "a-out", "b", "a-in"]).keys() == {"a-in", "a-out"}


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


def test_a_conversation_goes_from_its_end_whenever_its_last_response_was_made(make):
    database = make(max_responses=4)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        if previous:
            database.chain("", previous)  # as a request does
        database.add("", response(name, previous))
    for name in "xy":
        database.add("", response(name))
    assert [name for name in "abcxy" if database.get("", name)] == ["a", "b", "x", "y"]


def size_of(name: str, size: int) -> int:
    return response(name, size=size).num_bytes


def test_of_too_many_bytes_those_unused_for_longest_go(make):
    most = 3 * size_of("a", 900) + 100
    database = make(max_bytes=most)
    for name in "abcd":
        database.add("", response(name, size=900))
    assert [name for name in "abcd" if database.get("", name)] == ["b", "c", "d"]
    with pytest.raises(InvalidRequest, match=f"the limit is {most}"):
        database.add("", response("e", size=most))  # it alone is too much, and drives out nothing
    assert [name for name in "abcde" if database.get("", name)] == ["b", "c", "d"]


def test_items_count_with_the_room_that_they_take_beside_their_text(make):
    items = [Item("same", b"{}")] * 100
    assert KeptResponse("a", None, b"{}", items).num_bytes == RESPONSE_BYTES + 2 + 100 * (ITEM_BYTES + 8 + 2)
    database = make(max_bytes=20_000)
    for number in range(9):
        database.add("", KeptResponse(str(number), None, b"{}", items))
    assert [number for number in range(9) if database.get("", str(number))] == [7, 8]


def test_the_bounds_count_what_finishing_and_deleting_change(make):
    database = make(max_bytes=3 * size_of("b", 850) + 100)
    database.add("", response("a", is_running=True))
    database.finish("", response("a", size=2500))
    database.delete("", "a")
    for name in "bcd":
        database.add("", response(name, size=850))
    assert [name for name in "bcd" if database.get("", name)] == ["b", "c", "d"]


@pytest.mark.parametrize("bound", [{"max_responses": 6}, {"max_bytes": 6 * size_of("a0", 900) + 10}])
def test_an_owner_with_more_than_its_share_loses_its_own_and_others_lose_nothing(make, bound):
    database = make(**bound)
    for number in range(3):
        database.add("bob", response(f"b{number}", size=900))
    for number in range(9):
        database.add("ada", response(f"a{number}", size=900))
    assert [number for number in range(3) if database.get("bob", f"b{number}")] == [0, 1, 2]
    assert [number for number in range(9) if database.get("ada", f"a{number}")] == [6, 7, 8]
    database.delete("bob", "b0")
    database.add("ada", response("a9", size=900))  # what others leave is used
    assert [number for number in range(10) if database.get("ada", f"a{number}")] == [6, 7, 8, 9]
    database.add("bob", response("b3", size=900))  # and given back
    database.add("cleo", response("c0", size=900))
    database.add("cleo", response("c1", size=900))
    kept = {name: sum(bool(database.get(name, f"{name[0]}{number}")) for number in range(10))
            for name in ("ada", "bob", "cleo")}  # fmt: skip
    assert kept == {"ada": 2, "bob": 2, "cleo": 2}


def test_a_running_response_is_not_forgotten_to_make_room(make):
    database = make(max_responses=2)
    database.add("", response("a", is_running=True))
    database.add("", response("b"))
    database.add("", response("c"))
    assert [name for name in "abc" if database.get("", name)] == ["a", "c"]
    database.add("", response("d", is_running=True))
    with pytest.raises(Overloaded, match="no room for the response"):
        database.add("", response("e"))
    assert [name for name in "abcde" if database.get("", name)] == ["a", "d"]


def test_a_running_response_that_grows_too_large_is_not_kept_and_says_so(make):
    database = make(max_bytes=4000)
    database.add("", response("a", is_running=True))
    with pytest.raises(InvalidRequest, match="the limit is 4000"):
        database.finish("", response("a", size=4000))
    assert database.get("", "a").is_running
    database.fail("", "a", "it is too large")
    failed = json.loads(database.get("", "a").body)
    assert (failed["status"], failed["error"]["message"]) == ("failed", "it is too large")


def test_a_response_expires_after_its_last_use(make, machine):
    database = make(ttl_s=60)
    database.add("", response("a"))
    database.add("", response("b"))
    machine.pass_s(50)
    database.chain("", "a")
    machine.pass_s(50)
    assert database.get("", "a") is not None
    assert database.get("", "b") is None


def test_of_many_that_expire_at_once_each_reader_removes_a_few_and_sees_none(make, machine, tmp_path):
    database = make(tmp_path / "responses", max_responses=1000)
    num = 3 * NUM_EXPIRED_AT_ONCE
    for number in range(num):
        database.add("", response(str(number)))
    machine.pass_s(100)
    rows = sqlite3.connect(tmp_path / "responses")
    for left in (num, num - NUM_EXPIRED_AT_ONCE, num - 2 * NUM_EXPIRED_AT_ONCE, 0):
        assert rows.execute("SELECT count(*) FROM responses").fetchone() == (left,)
        assert database.find("", [f"{num - 1}-in"]) == {}
        assert database.chain("", str(num - 1)) is None


def test_a_running_response_is_finished_once_and_not_after_it_was_cancelled(make, tmp_path):
    path = str(tmp_path / "responses")
    database = make(path)
    database.add("ada", response("a", is_running=True))
    assert database.chain("ada", "a").is_running
    assert running_ids(path, database.runner) == {"a"}
    database.finish("ada", response("a"))
    assert running_ids(path, database.runner) == set()
    database.finish("ada", response("a", size=100))
    assert texts(database.chain("ada", "a")) == ["a asks", "a answers"]
    database.add("ada", response("b", is_running=True))
    database.cancel("bob", "b")
    assert running_ids(path, database.runner) == {"b"}
    database.cancel("ada", "b")
    assert running_ids(path, database.runner) == set()
    database.finish("ada", response("b"))
    assert json.loads(database.get("ada", "b").body)["status"] == "cancelled"


ADD_AND_DIE = """
import os, signal, sys
from quire.server.service.response_database import KeptResponse, ResponseDatabase
database = ResponseDatabase(sys.argv[1], 100, 10**6, 60)
for name in sys.argv[2:]:
    database.add("ada", KeptResponse(name, None, b'{"status":"in_progress"}', is_running=True))
print("added", flush=True)
if sys.argv[2:]:
    os.kill(os.getpid(), signal.SIGKILL if sys.argv[2] == "killed" else signal.SIGSTOP)
"""


def test_a_running_response_has_failed_once_its_process_is_gone_and_not_while_that_is_slow(make, machine, tmp_path):
    """A process that is stopped, as one that is slow, mentions nothing. The time that passes does not matter."""
    path = tmp_path / "responses"
    database = make(path, ttl_s=60)
    database.add("ada", response("own", is_running=True))
    processes = [
        subprocess.Popen([sys.executable, "-c", ADD_AND_DIE, str(path), name], stdout=subprocess.PIPE, text=True)
        for name in ("killed", "stopped")
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["added\n"] * 2
        processes[0].wait()
        machine.pass_s(1000)
        failed = json.loads(database.get("ada", "killed").body)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert not database.get("ada", "killed").is_running
        for name in ("own", "stopped"):
            assert json.loads(database.get("ada", name).body)["status"] == "in_progress"
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    assert json.loads(database.get("ada", "stopped").body)["status"] == "failed"
    database.close()
    make(path).close()
    assert not list(tmp_path.glob("*-process-*"))


def test_a_response_that_ends_with_its_process_while_it_is_read_has_not_failed(make, tmp_path):
    path = tmp_path / "responses"
    running, reader = make(path), make(path)
    running.add("ada", response("a", is_running=True))

    def end(statement: str) -> None:  # between the read and the look at the process
        if "FROM items" in statement and running.get("ada", "a").is_running:
            running.finish("ada", response("a"))
            running.close()

    reader._connection.set_trace_callback(end)
    found = reader.get("ada", "a")
    assert json.loads(found.body)["status"] == "completed"
    assert [item.id for item in found.output] == ["a-out"]


def test_files_that_only_look_like_locks_are_left_alone(make, tmp_path):
    notes = tmp_path / "responses-process-notes"
    notes.touch()
    left = tmp_path / "responses-process-0123456789abcdef"
    left.touch()
    make(tmp_path / "responses").close()
    assert notes.exists()
    assert not left.exists()


def test_lost_responses_end_though_they_are_not_asked_for(make, machine, tmp_path):
    path = tmp_path / "responses"
    database = make(path, ttl_s=3600)
    command = [sys.executable, "-c", ADD_AND_DIE, str(path), "killed", "also"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    machine.pass_s(2 * LOST_INTERVAL_S)
    database.get("bob", "any")
    rows = sqlite3.connect(path).execute("SELECT id, runner FROM responses ORDER BY id").fetchall()
    assert rows == [("also", None), ("killed", None)]


@pytest.mark.parametrize("jump_ns", [HOUR_NS, -HOUR_NS])
def test_setting_the_clock_neither_expires_nor_fails_nor_reorders_anything(make, machine, tmp_path, jump_ns):
    path = tmp_path / "responses"
    one = make(path, max_responses=3)
    one.add("", response("a", is_running=True))
    one.add("", response("b"))
    machine.wall_ns += jump_ns
    two = make(path, max_responses=3)  # a worker that starts afterwards
    two.add("", response("c"))
    for database in (one, two):
        assert [name for name in "abc" if database.get("", name)] == ["a", "b", "c"]
        assert database.get("", "a").is_running
    two.add("", response("d"))
    assert [name for name in "abcd" if one.get("", name)] == ["a", "c", "d"]
    machine.pass_s(61)
    assert [name for name in "abcd" if two.get("", name)] == ["a"]


def test_after_a_restart_of_the_machine_the_time_goes_by_the_wall_clock_and_not_back(make, machine, tmp_path):
    path = tmp_path / "responses"
    first = make(path, ttl_s=3600)
    first.add("", response("a"))
    first.close()
    machine.boot, machine.since_boot_ns = "second", 0
    machine.wall_ns = 0  # until the machine has asked for the time
    second = make(path, ttl_s=3600)
    assert second.get("", "a") is not None
    second.add("", response("b"))
    second.close()
    machine.boot, machine.since_boot_ns = "third", 0
    machine.wall_ns = 10**18 + HOUR_NS + 10**9
    third = make(path, ttl_s=3600)
    assert third.get("", "a") is None
    third.close()


# What one owner keeps, and what it costs others


def plans(database: ResponseDatabase, use) -> dict[str, list[str]]:
    """The plans of the statements that `use` makes the database run."""
    connection = database._connection
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    use()
    connection.set_trace_callback(None)
    asked = {one for one in statements if one.startswith(("SELECT", "UPDATE", "DELETE", "INSERT"))}
    return {one: [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {one}")] for one in asked}


def test_every_statement_finds_its_rows_by_a_key(make, machine, tmp_path):
    database = make(tmp_path / "responses", max_responses=4)

    def use() -> None:
        for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", None), ("e", None)):
            database.add("ada", response(name, previous))
            database.chain("ada", name)
        database.add("bob", response("b", is_running=True))
        database.finish("bob", response("b"))
        for name in ("f", "g"):
            database.add("bob", response(name, is_running=True))
        database.fail("bob", "f", "")
        database.cancel("bob", "g")
        database.get("bob", "g")
        database.find("ada", ["b-in", "none"])
        database.input_items("ada", "b")
        database.delete("ada", "b")
        machine.pass_s(100)
        database.get("ada", "a")

    found = plans(database, use)
    assert len(found) > 20
    bounded = ("USING COVERING INDEX by_responses", "USING COVERING INDEX by_bytes", "USING INDEX by_bytes",
               "USING INDEX by_responses", "USING COVERING INDEX by_runner", "SCAN CONSTANT ROW")  # fmt: skip
    slow = {
        one: plan
        for one, plan in found.items()
        if any("TEMP B-TREE" in step or ("SCAN" in step and not any(use in step for use in bounded)) for step in plan)
    }
    assert slow == {}


def test_what_one_owner_keeps_under_an_id_is_not_met_by_the_searches_of_another(make):
    """Counted in steps of SQLite's machine: thousands of items of one id once took minutes."""
    database = make(max_bytes=10**9)
    ids = [f"{number}" for number in range(50)]

    def num_steps(use) -> int:
        steps = [0]

        def count() -> int:
            steps[0] += 1
            return 0

        database._connection.set_progress_handler(count, 1)
        use()
        database._connection.set_progress_handler(None, 1)
        return steps[0]

    def search() -> None:
        assert database.find("bob", ids) == {}
        assert database.get("bob", "0") is None
        assert database.chain("bob", "0") is None
        assert database.input_items("bob", "0") is None
        assert not database.delete("bob", "0")

    database.add("bob", KeptResponse("own", None, b"{}"))
    before = num_steps(search)
    for number in range(5):
        database.add("ada", KeptResponse(f"{number}", None, b"{}", [Item("0", b"{}")] * 2000))
    assert num_steps(search) == before
    database.add("bob", KeptResponse("many", None, b"{}", [Item("0", b'"%d"' % at) for at in range(2000)]))
    few = num_steps(lambda: database.find("bob", ["0"]))
    assert few < 100
    assert database.find("bob", ["0"]) == {"0": b'"1999"'}  # the latest


def test_a_conversation_longer_than_is_read_is_cut_at_its_beginning(make):
    database = make(max_bytes=10**8)
    database.add("", response("a"))
    database.add("", response("b", "a"))
    many = [Item(str(number), b'{"text":"b asks"}') for number in range(MAX_ITEMS - 3)]
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


def test_processes_that_come_by_different_links_know_of_each_other(make, tmp_path):
    path, link = tmp_path / "responses.sqlite", tmp_path / "elsewhere" / "link"
    link.parent.mkdir()
    link.symlink_to(path)
    one, two = make(path), make(link)
    one.add("", response("a", is_running=True))
    two.add("", response("b", is_running=True))
    assert one.get("", "b").is_running
    assert two.get("", "a").is_running


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
    with sqlite3.connect(other) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
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
    database.add("ada", response("d"))
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


FIRST_TABLES = """
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
OLDER_TABLES = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, head BLOB NOT NULL, num_bytes INTEGER NOT NULL,
    used INTEGER NOT NULL, is_running INTEGER NOT NULL
) WITHOUT ROWID;
"""


@pytest.mark.parametrize("tables", ["first", "older"])
def test_a_file_of_the_first_version_is_taken_over(make, machine, tmp_path, tables):
    path = tmp_path / "responses"
    old = sqlite3.connect(path)
    older = FIRST_TABLES[FIRST_TABLES.index("CREATE INDEX by_use") :]
    old.executescript(FIRST_TABLES if tables == "first" else OLDER_TABLES + older)
    insert = (
        "INSERT INTO responses (id, owner, previous, num_bytes, used, is_running, head) VALUES (?, ?, ?, ?, ?, ?, ?)"
    )
    for name, previous, is_running in (("a", None, False), ("b", "a", False), ("c", None, True)):
        one = response(name, previous, is_running=is_running)
        old.execute(insert, (name, "ada", previous, 100, machine.wall_ns, is_running, one.head))
        for is_output, items in enumerate((one.input, one.output)):
            rows = [(name, is_output, place, *item) for place, item in enumerate(items)]
            old.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", rows)
    old.execute("PRAGMA application_id = 1903322483")
    old.execute("PRAGMA user_version = 1")
    old.commit()
    old.close()
    database = make(path, max_responses=3)
    assert texts(database.chain("ada", "b")) == ["a asks", "a answers", "b asks", "b answers"]
    assert database.find("ada", ["b-in", "a-out"]).keys() == {"b-in", "a-out"}
    assert json.loads(database.get("ada", "c").body)["status"] == "failed"
    assert database.get("bob", "a") is None
    database.add("ada", response("d"))
    assert [name for name in "abcd" if database.get("ada", name)] == ["a", "b", "d"]
