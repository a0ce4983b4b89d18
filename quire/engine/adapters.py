"""The adapters that an engine has, by name."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.adapter_slots import AdapterSlots
from quire.engine.executor import Executor
from quire.errors import EngineFailed, InvalidAdapter, ModelNotFound, NoSuchRoute, listed, reason_of, shown
from quire.ipc.messages import Submit

log = logging.getLogger(__name__)

Read = Callable[[str], Any]  # an adapter's folder to its arrays; raises `InvalidAdapter`


class ReadAdapter(NamedTuple):
    """The contents of an adapter's files."""

    arrays: Any
    digest: str


class LoadedAdapters:
    """The folder of each adapter, and its arrays on the executor's host for as long as requests may use them.

    Files are read by another thread, so that steps go on meanwhile. `version` grows with every change: of two tables of
    the same server the one with the higher version is right. A request keeps the adapter that it began with, also when
    another engine goes on with it: that one finds it by its digest. Owned by the engine thread.
    """

    def __init__(
        self, slots: AdapterSlots, executor: Callable[[], Executor], read: Read | None, root: Path | None = None
    ) -> None:
        """`root`: the folder below which clients may load adapters; None where they may not."""
        self._slots = slots
        self._executor = executor
        self._read = read
        self.root = root
        self._reading: dict[str, Future[ReadAdapter]] = {}
        self._reading_former: dict[str, Future[ReadAdapter]] = {}  # by digest, for requests that began elsewhere
        self._awaited: dict[int, str] = {}  # digests of those, by the request that waits
        self._held: dict[int, int] = {}  # numbers, by the request that will have the adapter
        self._pool = ThreadPoolExecutor(1, "quire-adapters")  # its thread starts on the first submit
        self.folders: dict[str, str] = {}
        self.version = 0

    def load(self, name: str, folder: str) -> None:
        """Read an adapter and wait for it."""
        self._use(name, folder, self._read_folder(self._need_read(), folder))

    def begin_load(self, name: str, folder: str) -> "Future[ReadAdapter]":
        """Read an adapter on another thread. Requests for it wait until `end_load`."""
        self._reading[name] = self._pool.submit(self._read_folder, self._need_read(), folder)
        return self._reading[name]

    def end_load(self, name: str, folder: str, read: "Future[ReadAdapter]") -> None:
        """Use what was read. Raises why it cannot be."""
        self.forget_load(name, read)
        self._use(name, folder, read.result())

    def forget_load(self, name: str, read: "Future[ReadAdapter]") -> None:
        """Forget an adapter that was read and is not wanted any more. Requests wait for it no longer."""
        if self._reading.get(name) is read:
            del self._reading[name]

    def prepare(self, submit: Submit) -> "Future[ReadAdapter] | None":
        """The adapter of a request that is being read. Called until it returns None. Raises EngineFailed where the
        request has begun elsewhere, and there is no such adapter any more."""
        request = submit.request
        if request.adapter is None:
            return None
        reading = self._reading.get(request.adapter)
        if not request.adapter_digest:
            return reading
        number = self._slots.with_digest(request.adapter, request.adapter_digest)
        if number is None:
            if reading is None:
                reading = self._read_former(request.adapter_digest, submit.adapter_folder, request.adapter)
                self._awaited[request.request_id] = request.adapter_digest
            if not reading.done() or reading is self._reading.get(request.adapter):
                return reading
            adapter = reading.result()
            del self._reading_former[request.adapter_digest]
            number = self._slots.hold_former(request.adapter, request.adapter_digest, self._add(adapter))
            log.info("adapter %s is loaded as it was, for requests that began with it", request.adapter)
        else:
            self._slots.hold(number)
        self._held[request.request_id] = number
        return None

    def release(self, request_id: int) -> None:
        """The request has its adapter, or needs none any more."""
        digest = self._awaited.pop(request_id, "")
        if digest not in self._awaited.values():  # what was read for it has no other use
            self._reading_former.pop(digest, None)
        number = self._held.pop(request_id, None)
        if number is not None:
            self._slots.release(number)
            self.drop_unused()

    def current(self, name: str) -> tuple[str, str]:
        """The digest and the folder of the adapter that `name` stands for now."""
        return self._slots.digest_of(self._slots.find(name)), self.folders[name]

    def _read_former(self, digest: str, folder: str, name: str) -> "Future[ReadAdapter]":
        """Read the adapter that requests have begun with, once for all of them. It must be the same still."""

        def read() -> ReadAdapter:
            what = f"the engine ended, and adapter {shown(name)}, which the answer began with, is lost"
            try:
                adapter = self._read_folder(self._need_read(), folder)
            except Exception as error:
                log.warning("adapter %s: %s: %r", name, what, error)
                reason = self.message_for_clients(reason_of(error))
                raise EngineFailed(f"{what}: {reason}; send the request again") from error
            if adapter.digest != digest:
                log.warning("adapter %s: %s: the files in %s have changed", name, what, folder)
                raise EngineFailed(f"{what}: its files have changed since; send the request again")
            return adapter

        if digest not in self._reading_former:
            self._reading_former[digest] = self._pool.submit(read)
        return self._reading_former[digest]

    def _use(self, name: str, folder: str, read: ReadAdapter) -> None:
        """`name` stands for this adapter from now on. Requests that run with another of that name keep it."""
        self._slots.load(name, read.digest, self._add(read))
        self.folders[name] = folder
        self.version += 1
        self.drop_unused()
        log.info("adapter %s is loaded from %s", name, folder)

    def _add(self, read: ReadAdapter) -> int:
        """Give the arrays to the executor. Returns their number, which means nothing yet: where there is no memory for
        them, names stand for what they stood for before."""
        number = self._slots.new_number()
        self._executor().add_adapter(number, read.arrays)
        return number

    def unload(self, name: str) -> None:
        """Requests for it are refused from now on; those that have begun go on."""
        if name not in self.folders:
            known = listed(sorted(self.folders)) or "none"
            raise ModelNotFound(f"there is no adapter {shown(name)}; loaded are: {known}", param="lora_name")
        self._slots.unload(name)
        del self.folders[name]
        self.version += 1
        self.drop_unused()
        log.info("adapter %s is unloaded", name)

    def drop_unused(self) -> None:
        """Free arrays that no request uses or can name."""
        for number in self._slots.take_unneeded():
            self._executor().drop_adapter(number)

    def digest_of(self, name: str | None) -> str | None:
        """Names the weights of an adapter for other engines; "" without one. None where it is not loaded. Any thread
        may ask."""
        if name is None:
            return ""
        try:
            return self._slots.digest_of(self._slots.find(name))
        except (ModelNotFound, KeyError):  # it goes at this moment
            return None

    def allowed(self, path: str = "") -> str:
        """The folder that a client names, which must lie below the one that is allowed, wherever links lead."""
        if self.root is None:
            raise NoSuchRoute("adapters cannot be loaded while serving; start the server with --adapter-folder")
        folder = (self.root / path).resolve()
        if not folder.is_relative_to(self.root.resolve()):
            raise InvalidAdapter(f"lora_path is {shown(path)}; it must be below the folder of --adapter-folder")
        return str(folder)

    def message_for_clients(self, message: str) -> str:
        """`message` with paths relative to the folder that clients know, which they name so themselves."""
        return message if self.root is None else message.replace(f"{self.root.resolve()}/", "")

    def _read_folder(self, read: Read, folder: str) -> ReadAdapter:
        arrays = read(folder)
        return ReadAdapter(arrays, self._executor().adapter_digest(arrays))

    def _need_read(self) -> Read:
        if self._read is None:
            raise InvalidAdapter("this engine has no room for adapters: max_loras is 0")
        return self._read
