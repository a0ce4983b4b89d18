"""Commands of front ends about adapters."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from quire.engine.adapters import LoadedAdapters, ReadAdapter
from quire.engine.port import Port
from quire.errors import InvalidAdapter, QuireError, reason_of
from quire.ipc.messages import AdapterDone, AdapterTable, LoadAdapter, SyncAdapters, UnloadAdapter

log = logging.getLogger(__name__)

AdapterCommand = LoadAdapter | UnloadAdapter | SyncAdapters


class AdapterRead(NamedTuple):
    """The files of an adapter were read, or could not be."""

    number: int  # of the command; 0: none waits for an answer
    name: str
    folder: str
    read: "Future[ReadAdapter]"


class AdapterCommands:
    """Loads and unloads adapters, and sends the table to all front ends. Owned by the engine thread."""

    def __init__(self, adapters: LoadedAdapters, post: Callable[[Port, AdapterRead], None]) -> None:
        """`post` is called by another thread when an adapter was read."""
        self._adapters = adapters
        self._post = post
        self._reading_again: dict[str, str] = {}  # folders by name, of a table that another engine had

    def table(self) -> AdapterTable:
        """All adapters, including those being read again, for which requests wait."""
        return AdapterTable(self._adapters.version, self._adapters.folders | self._reading_again)

    def handle(self, port: Port, command: AdapterCommand | AdapterRead) -> AdapterDone | None:
        """The answer to a command, unless that comes later."""
        if isinstance(command, SyncAdapters):
            self._sync(port, command)
            return None
        try:
            if isinstance(command, LoadAdapter):
                folder = self._adapters.allowed(command.path)
                self._begin(port, command.number, command.name, folder)
                return None
            if isinstance(command, UnloadAdapter):
                self._adapters.allowed()
                self._unload(command.name)
            elif not command.number:
                self._end_sync(command)
            else:
                self._adapters.end_load(command.name, command.folder, command.read)
        except QuireError as error:
            log.warning("adapter %s: %s", command.name, error)
            return AdapterDone(command.number, error.kind, self._adapters.message_for_clients(error.message))
        except Exception as error:  # while files were read
            log.exception("adapter %s cannot be loaded", command.name)
            return AdapterDone(command.number, InvalidAdapter.kind, f"{command.name}: {reason_of(error)}")
        return AdapterDone(command.number)

    def _sync(self, port: Port, command: SyncAdapters) -> None:
        """Load the adapters of another engine's table, if that is newer."""
        adapters, known = self._adapters, self.table()
        if command.version <= known.version:
            return
        for name in adapters.folders.keys() - command.folders.keys():
            adapters.unload(name)
        self._reading_again = {
            name: folder for name, folder in command.folders.items() if adapters.folders.get(name) != folder
        }
        for name, folder in self._reading_again.items():
            if known.folders.get(name) != folder:
                self._begin(port, 0, name, folder)
        adapters.version = command.version

    def _end_sync(self, command: AdapterRead) -> None:
        """Use what was read again, unless it was unloaded meanwhile. The table had it all the time. What cannot be read
        is unloaded: it is in the table no more."""
        adapters, is_wanted = self._adapters, self._reading_again.get(command.name) == command.folder
        if not is_wanted:
            adapters.forget_load(command.name, command.read)
            return
        version = adapters.version
        try:
            adapters.end_load(command.name, command.folder, command.read)
        except Exception:
            self._unload(command.name)  # front ends hear of it, and none is answered by another of that name
            raise
        del self._reading_again[command.name]
        adapters.version = version

    def _unload(self, name: str) -> None:
        was_read_again = self._reading_again.pop(name, None) is not None
        if was_read_again and name not in self._adapters.folders:
            self._adapters.version += 1
        else:
            self._adapters.unload(name)

    def _begin(self, port: Port, number: int, name: str, folder: str) -> None:
        reading = self._adapters.begin_load(name, folder)
        reading.add_done_callback(lambda read: self._post(port, AdapterRead(number, name, folder, read)))
