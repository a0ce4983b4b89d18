"""Responses that are kept for later requests, off the event loop."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from quire.errors import Overloaded, QuireError
from quire.server.service.response_database import MEMORY, Chain, Item, KeptResponse, ResponseDatabase
from quire.server.service.stream import Stream
from quire.server.settings import ServerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING = 1024  # readers; writers are as many as requests that may be open
RETRY_S = 1.0
MENTION_INTERVAL_S = 0.5  # a response that another process cancels stops within this time


class ResponseStore:
    """Reads and writes the database in a thread of its own. Owned by the event loop.

    In memory it is this process's own; a file is shared by all processes that have it open.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._path = settings.response_store or MEMORY
        self._limits = settings.max_stored_responses, settings.max_stored_bytes, settings.stored_response_ttl_s
        self.is_on = settings.max_stored_responses > 0
        self._thread = ThreadPoolExecutor(1, "quire-responses")
        self._database: ResponseDatabase | None = None
        self._num_waiting = 0
        self._running: dict[str, Stream] = {}  # responses in the background, of this process
        self._tasks: set[asyncio.Task[None]] = set()
        self._mentioning: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises InvalidSetting where the file cannot be used."""
        await self._run(lambda database: None)

    async def close(self, within_s: float) -> None:
        """Wait for responses in the background, up to `within_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        if self._mentioning is not None:
            self._mentioning.cancel()
        if self._database is not None:
            await self._run(ResponseDatabase.close)

    def run_in_background(self, response_id: str, stream: Stream, work: Coroutine[Any, Any, None]) -> None:
        """`work` reads `stream`, and finishes the response that was added as running."""
        self._running[response_id] = stream
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly

        def end(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            self._running.pop(response_id, None)

        task.add_done_callback(end)
        if self._mentioning is None or self._mentioning.done():
            self._mentioning = asyncio.create_task(self._mention())

    async def _mention(self) -> None:
        """While any response runs: tell other processes, and find those that were cancelled."""
        while self._running:
            try:
                ended = await self._run(partial(ResponseDatabase.mention, ids=list(self._running)))
                for response_id in ended:
                    self.stop(response_id)
            except QuireError as error:
                log.warning("responses in the background cannot be mentioned: %s", error.message)
            await asyncio.sleep(MENTION_INTERVAL_S)

    def stop(self, response_id: str) -> None:
        """End a response that runs in this process; other processes notice it later."""
        stream = self._running.get(response_id)
        if stream is not None:
            stream.close()

    async def add(self, owner: str, response: KeptResponse) -> bool:
        """Keep a response. False, and a line in the log, where it cannot be."""
        try:
            if await self._run(lambda database: database.add(owner, response)):
                return True
            log.warning("a response of %d bytes is larger than max_stored_bytes; not kept", response.num_bytes)
        except QuireError as error:
            log.error("a response is not kept: %s", error.message)
        return False

    async def finish(self, response: KeptResponse) -> None:
        try:
            await self._run(lambda database: database.finish(response))
        except QuireError as error:
            log.error("a response is not kept: %s", error.message)

    async def get(self, owner: str, response_id: str) -> KeptResponse | None:
        return await self._read(lambda database: database.get(owner, response_id))

    async def cancel(self, owner: str, response_id: str) -> KeptResponse | None:
        """The response afterwards. One that does not run stays as it is."""

        def cancelled(database: ResponseDatabase) -> KeptResponse | None:
            found = database.get(owner, response_id)
            if found is None or not found.is_running:
                return found
            database.cancel(response_id, found.head)
            return database.get(owner, response_id)

        return await self._read(cancelled)

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._read(lambda database: database.delete(owner, response_id))

    async def chain(self, owner: str, response_id: str) -> Chain | None:
        return await self._read(lambda database: database.chain(owner, response_id))

    async def find(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        return await self._read(lambda database: database.find(owner, item_ids))

    async def input_items(self, owner: str, response_id: str) -> list[Item] | None:
        return await self._read(lambda database: database.input_items(owner, response_id))

    async def _read(self, work: Callable[[ResponseDatabase], T]) -> T:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{self._num_waiting} uses of kept responses wait; the limit is {MAX_WAITING}", RETRY_S)
        return await self._run(work)

    async def _run(self, work: Callable[[ResponseDatabase], T]) -> T:
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._work(work))
        finally:
            self._num_waiting -= 1

    def _work(self, work: Callable[[ResponseDatabase], T]) -> T:
        if self._database is None:
            self._database = ResponseDatabase(self._path, *self._limits)
        try:
            return work(self._database)
        except sqlite3.Error as error:
            raise QuireError(f"the store of responses cannot be used: {error}") from error
