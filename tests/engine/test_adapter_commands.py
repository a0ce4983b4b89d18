"""An engine that starts again has the adapters that clients loaded before, and says so from the start."""

from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest

from quire.core.adapter_slots import AdapterSlots
from quire.engine.adapter_commands import AdapterCommands, AdapterRead
from quire.engine.adapters import LoadedAdapters
from quire.engine.port import Port
from quire.errors import InvalidAdapter
from quire.ipc.messages import AdapterDone, AdapterTable, LoadAdapter, Submit, SyncAdapters, UnloadAdapter
from tests.core.harness import request
from tests.fake_executor import FakeExecutor
from tests.patience import WAIT_S


class Commands:
    """Commands of one front end to an engine whose adapters are read one after the other."""

    def __init__(self, tmp_path: Any) -> None:
        self.read: SimpleQueue[AdapterRead] = SimpleQueue()
        self.may_read = Event()
        self.may_read.set()
        self.slots = AdapterSlots(4)
        executor: Any = FakeExecutor(8, 4, 4)
        self.adapters = LoadedAdapters(self.slots, lambda: executor, self._open, tmp_path)
        self.commands = AdapterCommands(self.adapters, lambda port, read: self.read.put(read))
        self.port = Port(lambda port, command: None, 1, lambda events: None)

    def handle(self, command: Any) -> AdapterDone | None:
        return self.commands.handle(self.port, command)

    def finish_one(self) -> None:
        """Let the engine use the adapter that was read first."""
        self.handle(self.read.get(timeout=WAIT_S))

    @property
    def table(self) -> AdapterTable:
        return self.commands.table()

    def _open(self, folder: str) -> Any:
        assert self.may_read.wait(WAIT_S)
        if folder.endswith("gone"):
            raise InvalidAdapter(f"{folder}: there is no such folder")
        return [folder]


@pytest.fixture
def commands(tmp_path: Any) -> Commands:
    return Commands(tmp_path)


def test_adapters_that_are_being_read_again_are_in_the_table(commands: Commands) -> None:
    """Front ends take the table as it is: what is missing there is refused, and forgotten if the engine ends again."""
    commands.handle(SyncAdapters(7, {"a": "/a", "b": "/b"}))
    assert commands.table == AdapterTable(7, {"a": "/a", "b": "/b"})
    commands.finish_one()
    assert commands.table.folders == {"a": "/a", "b": "/b"}
    commands.finish_one()
    assert commands.adapters.folders == {"a": "/a", "b": "/b"}


def test_to_read_adapters_again_is_no_change_of_the_table(commands: Commands) -> None:
    """Or an engine that started again would count more changes than the others, whose news are then old."""
    commands.handle(SyncAdapters(7, {"a": "/a", "b": "/b"}))
    commands.finish_one()
    commands.finish_one()
    assert commands.table.version == 7


def test_a_newer_table_takes_the_place_of_one_that_is_being_read(commands: Commands) -> None:
    commands.handle(SyncAdapters(7, {"a": "/a", "b": "/b", "c": "/c"}))
    commands.handle(SyncAdapters(8, {"a": "/a", "c": "/other"}))
    for _ in range(4):
        commands.finish_one()
    assert commands.table == AdapterTable(8, {"a": "/a", "c": "/other"})
    assert commands.slots.names == ["a", "c"]
    assert commands.read.empty(), "an adapter was read twice"


def test_an_adapter_can_be_unloaded_while_it_is_read_again(commands: Commands) -> None:
    commands.adapters.load("c", "/of-the-settings")
    commands.handle(SyncAdapters(7, {"a": "/a", "b": "/b", "c": "/c"}))
    assert commands.handle(UnloadAdapter(1, "b")) == AdapterDone(1)
    assert commands.handle(UnloadAdapter(2, "c")) == AdapterDone(2)
    assert commands.table == AdapterTable(9, {"a": "/a"})
    for _ in range(3):
        commands.finish_one()
    assert commands.table == AdapterTable(9, {"a": "/a"})
    assert commands.adapters.prepare(Submit(request(1, adapter="b"))) is None


def test_one_that_cannot_be_read_again_is_gone(commands: Commands) -> None:
    """Front ends are told, by a table of a new version. One of the settings does not take its place."""
    commands.adapters.load("c", "/of-the-settings")
    commands.handle(SyncAdapters(7, {"a": "/gone", "b": "/b", "c": "/c/gone"}))
    for _ in range(3):
        commands.finish_one()
    assert commands.table == AdapterTable(9, {"b": "/b"})
    assert commands.slots.names == ["b"]


def test_a_client_loads_one_while_others_are_read_again(commands: Commands, tmp_path: Any) -> None:
    commands.handle(SyncAdapters(7, {"a": "/a"}))
    assert commands.handle(LoadAdapter(1, "b", "b")) is None
    commands.finish_one()
    assert commands.table == AdapterTable(7, {"a": "/a"})
    commands.finish_one()
    assert commands.table == AdapterTable(8, {"a": "/a", "b": str(tmp_path / "b")})


def test_what_was_read_for_requests_that_have_left_is_forgotten(commands: Commands) -> None:
    """They began with it in an engine that ended."""
    digest = FakeExecutor(8, 4, 4).adapter_digest(["/a"])
    submits = [Submit(request(n, adapter="a", adapter_digest=digest), adapter_folder="/a") for n in range(4)]
    commands.may_read.clear()
    reading = commands.adapters.prepare(submits[0])
    assert reading is not None
    assert commands.adapters.prepare(submits[1]) is reading, "it is read once for both"
    commands.may_read.set()
    reading.result(WAIT_S)
    commands.may_read.clear()
    for request_id in (0, 1):
        commands.adapters.release(request_id)
    again = commands.adapters.prepare(submits[2])
    assert again is not None
    assert again is not reading
    assert commands.adapters.prepare(submits[3]) is again
    commands.may_read.set()
    again.result(WAIT_S)
    commands.adapters.release(2)
    assert commands.adapters.prepare(submits[3]) is None, "the other one has it"
    commands.adapters.release(3)
    assert commands.slots.with_digest("a", digest) is None
