"""The adapters that an engine has, by name."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quire.core.adapter_slots import AdapterSlots
from quire.engine.executor import Executor
from quire.errors import InvalidAdapter, ModelNotFound, NoSuchRoute, listed, shown

log = logging.getLogger(__name__)

Read = Callable[[str], Any]  # an adapter's folder to its arrays; raises `InvalidAdapter`


class LoadedAdapters:
    """The folder of each adapter, and its arrays on the executor's host for as long as requests may use them.

    Files are read by another thread, so that steps go on meanwhile. `version` grows with every change: of two tables of
    the same server the one with the higher version is right. Owned by the engine thread.
    """

    def __init__(
        self, slots: AdapterSlots, executor: Callable[[], Executor], read: Read | None, root: Path | None = None
    ) -> None:
        """`root`: the folder below which clients may load adapters; None where they may not."""
        self._slots = slots
        self._executor = executor
        self._read = read
        self.root = root
        self._numbers: set[int] = set()  # on the executor's host
        self._reading: dict[str, Future[Any]] = {}
        self._pool = ThreadPoolExecutor(1, "quire-adapters")  # its thread begins with its first work
        self._digests: dict[int, Future[str]] = {}  # by number, of those that were asked for
        self.folders: dict[str, str] = {}
        self.version = 0

    def load(self, name: str, folder: str) -> None:
        """Read an adapter and wait for it."""
        self.add(name, folder, self._need_read()(folder))

    def begin_load(self, name: str, folder: str) -> "Future[Any]":
        """Read an adapter on another thread. Requests for it wait until `end_load`."""
        self._reading[name] = self._pool.submit(self._need_read(), folder)
        return self._reading[name]

    def end_load(self, name: str, folder: str, read: "Future[Any]") -> None:
        """Use what was read. Raises why it cannot be."""
        self.forget_load(name, read)
        self.add(name, folder, read.result())

    def forget_load(self, name: str, read: "Future[Any]") -> None:
        """Forget an adapter that was read and is not wanted any more. Requests wait for it no longer."""
        if self._reading.get(name) is read:
            del self._reading[name]

    def reading(self, name: str | None) -> "Future[Any] | None":
        """The future of an adapter that is being read."""
        return None if name is None else self._reading.get(name)

    def add(self, name: str, folder: str, adapter: Any) -> None:
        """`name` stands for this adapter from now on. Requests that run with another of that name keep it."""
        number = self._slots.load(name)
        self._executor().add_adapter(number, adapter)
        self._numbers.add(number)
        self.folders[name] = folder
        self.version += 1
        self.drop_unused()
        log.info("adapter %s is loaded from %s", name, folder)

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
        for number in [number for number in self._numbers if not self._slots.is_needed(number)]:
            self._numbers.discard(number)
            self._digests.pop(number, None)
            self._executor().drop_adapter(number)

    def digest_of(self, name: str | None) -> str | None:
        """Names the weights of an adapter for other engines; "" without one. None where it is not loaded, or while the
        first question for it is answered, by another thread. Any thread may ask."""
        if name is None:
            return ""
        try:
            number = self._slots.find(name)
        except ModelNotFound:
            return None
        digest = self._digests.get(number)
        if digest is None:
            digest = self._digests[number] = self._pool.submit(self._executor().adapter_digest, number)
        return digest.result() if digest.done() and digest.exception() is None else None

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

    def _need_read(self) -> Read:
        if self._read is None:
            raise InvalidAdapter("this engine has no room for adapters: max_loras is 0")
        return self._read
