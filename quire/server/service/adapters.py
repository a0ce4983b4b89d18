"""The adapters of the engines as one HTTP worker knows them, and their loading by clients."""

import asyncio
from collections.abc import Callable
from itertools import count

from quire.errors import EngineFailed, error_of, invalid
from quire.ipc.messages import AdapterDone, AdapterTable, Command, LoadAdapter, SyncAdapters, UnloadAdapter
from quire.server.service.engines import Engines, Port
from quire.server.service.served_model import ServedModel


class ServedAdapters:
    """Keeps `ServedModel.adapters` as the engines have them.

    Every change is made by all engines, which notify all workers. An engine that starts later gets the table that this
    worker has; of the tables of several workers it takes the one with the highest version. Owned by the event loop.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._version = -1
        self._numbers = count(1)
        self._waiting: dict[int, tuple[Port, asyncio.Future[AdapterDone]]] = {}
        self._loading: set[str] = set()  # names of adapters that engines load

    def on_table(self, table: AdapterTable) -> None:
        if table.version >= self._version:
            self._version = table.version
            folders = self._model.adapters
            for name in folders.keys() - table.folders.keys():
                del folders[name]
            folders.update(table.folders)

    def on_done(self, done: AdapterDone) -> None:
        _, waiting = self._waiting.pop(done.number, (None, None))
        if waiting is not None and not waiting.done():
            waiting.set_result(done)

    def greet(self, port: Port) -> None:
        """Send the adapters to an engine, before any request that names one."""
        if self._version >= 0:
            port.send(SyncAdapters(self._version, dict(self._model.adapters)))

    async def load(self, name: str, path: str, engines: Engines, *, replaces: bool) -> None:
        """Have all engines load an adapter. Raises why the first of them does not."""
        if name in self._model.known_as:
            raise invalid("lora_name", f"is {name!r}, which is a name of the model itself")
        if name in self._model.adapters and not replaces:
            raise invalid("lora_name", f"is {name!r}, which is loaded already; load_inplace replaces it")
        if name in self._loading:  # if one of two fails, it must not unload the other
            raise invalid("lora_name", f"is {name!r}, which is being loaded for another request")
        self._loading.add(name)
        try:
            await self._load(name, path, engines)
        finally:
            self._loading.discard(name)

    async def _load(self, name: str, path: str, engines: Engines) -> None:
        before, connected = self._model.adapters.get(name), _connected(engines)
        done = await self._ask(connected, lambda number: LoadAdapter(number, name, path))
        failed = [one for one in done if one.kind is not None]
        # Of another folder, engines that failed hear by the table; those that ended read it anew in any case.
        is_same_folder = before == self._model.adapters.get(name)
        is_mixed = is_same_folder and any(one.kind != EngineFailed.kind for one in failed)
        if failed and (before is None or is_mixed):  # those that have it must not be the only ones
            ports = [port for port, one in zip(connected, done, strict=True) if one.kind is None]
            await self._ask(ports, lambda number: UnloadAdapter(number, name))
        self._agree(engines)
        _raise_first(failed)

    async def unload(self, name: str, engines: Engines) -> None:
        """Requests for it are refused from now on; those that have begun go on."""
        if name not in self._model.adapters:
            raise self._model.not_found(name, field="lora_name")
        done = await self._ask(_connected(engines), lambda number: UnloadAdapter(number, name))
        self._agree(engines)
        _raise_first([one for one in done if one.kind is not None])

    def engine_lost(self, lost: Port | None, reason: str) -> None:
        """An engine is gone. Its pending commands are repeated by the next one, or have failed."""
        for number, (port, _) in list(self._waiting.items()):
            if port is lost:
                self.on_done(AdapterDone(number, EngineFailed.kind, reason))

    def _agree(self, engines: Engines) -> None:
        """Synchronise all engines after a change: one may have connected since, or have failed to apply it."""
        for engine in engines if len(engines) > 1 else ():
            if engine.port is not None:
                self.greet(engine.port)

    async def _ask(self, ports: list[Port], command: Callable[[int], Command]) -> list[AdapterDone]:
        futures = []
        for port in ports:
            number = next(self._numbers)
            future: asyncio.Future[AdapterDone] = asyncio.get_running_loop().create_future()
            self._waiting[number] = port, future
            futures.append(future)
            port.send(command(number))
        return list(await asyncio.gather(*futures))


def _connected(engines: Engines) -> list[Port]:
    ports = [engine.port for engine in engines if engine.port is not None]
    if not ports:
        raise EngineFailed("no engine is ready", 1.0)
    return ports


def _raise_first(failed: list[AdapterDone]) -> None:
    if failed:
        raise error_of(failed[0].kind or "", failed[0].message)
