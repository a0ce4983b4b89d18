"""Responses that are kept for later requests, off the event loop."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from quire.errors import Overloaded, QuireError, StoreFailed, reason_of
from quire.server.service.owner_turns import OwnerTurns
from quire.server.service.response_database import Chain, Item, KeptResponse, ResponseDatabase, running_ids
from quire.server.service.response_tables import MEMORY
from quire.server.service.stream import Stream
from quire.server.settings import ServerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING = 1024  # readers of one owner; writers are as many as requests that may be open
RETRY_S = 1.0
WATCH_INTERVAL_S = 0.5  # a response that another process cancels stops within this time


class ResponseStore:
    """Reads and writes the database in a thread of its own, by turns of owners. Owned by the event loop.

    In memory it is this process's own; a file is shared by all processes that have it open.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._path = settings.response_store or MEMORY
        self._limits = settings.max_stored_responses, settings.max_stored_bytes, settings.stored_response_ttl_s
        self.is_on = settings.max_stored_responses > 0
        self._turns = OwnerTurns("quire-responses")
        self._watch_thread = ThreadPoolExecutor(1, "quire-running")  # apart: readers can take long
        self._database: ResponseDatabase | None = None
        self._has_trouble = False
        self._running: dict[str, Stream] = {}  # responses in the background, of this process
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises InvalidSetting where the file cannot be used."""
        await self._run("", lambda database: None)

    async def close(self, within_s: float) -> None:
        """Wait for responses in the background, up to `within_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in (*self._tasks, *([self._watching] if self._watching is not None else [])):
            task.cancel()
        if self._database is not None:
            await self._turns.all_taken()
            await self._run("", ResponseDatabase.close)

    def run_in_background(
        self, owner: str, response_id: str, stream: Stream, work: Coroutine[Any, Any, KeptResponse | None]
    ) -> None:
        """`work` reads `stream`, and gives what the response that was added as running has become; None where it was
        stopped."""
        self._running[response_id] = stream
        task = asyncio.create_task(self._keep_result(owner, response_id, work))
        self._tasks.add(task)  # the loop itself holds tasks weakly

        def end(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            self._running.pop(response_id, None)
            stream.close()

        task.add_done_callback(end)
        if self._path != MEMORY and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())

    async def _keep_result(self, owner: str, response_id: str, work: Coroutine[Any, Any, KeptResponse | None]) -> None:
        try:
            ended = await work
            if ended is not None:
                await self._insist(owner, lambda database: database.finish(owner, ended))
        except Exception as error:  # whatever it is, the response has ended with it
            if not isinstance(error, QuireError):
                log.exception("the response %s in the background failed", response_id)
            reason = reason_of(error)
            await self._insist(owner, lambda database: database.fail(owner, response_id, reason))

    async def _insist(self, owner: str, work: Callable[[ResponseDatabase], None]) -> None:
        """Write how a response ended, as soon as that can be written."""
        while True:
            try:
                return await self._run(owner, work)
            except StoreFailed:
                await asyncio.sleep(RETRY_S)

    async def _watch(self) -> None:
        """While any response runs: find those that other processes cancelled."""
        loop = asyncio.get_running_loop()
        assert self._database is not None, "a response was added before"
        runner = self._database.runner
        is_in_vain = False
        while self._running:
            asked = list(self._running)
            try:
                going_on = await loop.run_in_executor(self._watch_thread, running_ids, self._path, runner)
            except sqlite3.Error as error:
                if not is_in_vain:
                    log.warning("other processes cannot cancel responses of this one: %s", error)
                is_in_vain = True
            else:
                is_in_vain = False
                for response_id in asked:
                    if response_id not in going_on:
                        self.stop(response_id)
            await asyncio.sleep(WATCH_INTERVAL_S)

    def stop(self, response_id: str) -> None:
        """End a response that runs in this process; other processes notice it later."""
        stream = self._running.get(response_id)
        if stream is not None:
            stream.close()

    async def add(self, owner: str, response: KeptResponse) -> QuireError | None:
        """Keep a response. The reason why it is not kept, which is in the log, where it cannot be."""
        try:
            await self._run(owner, lambda database: database.add(owner, response))
        except StoreFailed as error:  # logged once, for all of them
            return error
        except QuireError as error:
            log.warning("a response is not kept: %s", error.message)
            return error
        return None

    async def get(self, owner: str, response_id: str) -> KeptResponse | None:
        return await self._read(owner, lambda database: database.get(owner, response_id))

    async def cancel(self, owner: str, response_id: str) -> KeptResponse | None:
        """The response afterwards. One that does not run stays as it is."""

        def cancelled(database: ResponseDatabase) -> KeptResponse | None:
            found = database.get(owner, response_id)
            if found is None or not found.is_running:
                return found
            database.cancel(owner, response_id)
            return database.get(owner, response_id)

        return await self._read(owner, cancelled)

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._read(owner, lambda database: database.delete(owner, response_id))

    async def chain(self, owner: str, response_id: str) -> Chain | None:
        return await self._read(owner, lambda database: database.chain(owner, response_id))

    async def find(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
        return await self._read(owner, lambda database: database.find(owner, item_ids))

    async def input_items(self, owner: str, response_id: str) -> list[Item] | None:
        return await self._read(owner, lambda database: database.input_items(owner, response_id))

    async def _read(self, owner: str, work: Callable[[ResponseDatabase], T]) -> T:
        num_waiting = self._turns.num_waiting(owner)
        if num_waiting >= MAX_WAITING:
            raise Overloaded(f"{num_waiting} uses of kept responses wait; the limit is {MAX_WAITING}", RETRY_S)
        return await self._run(owner, work)

    async def _run(self, owner: str, work: Callable[[ResponseDatabase], T]) -> T:
        return await self._turns.run(owner, lambda: self._work(work))

    def _work(self, work: Callable[[ResponseDatabase], T]) -> T:
        if self._database is None:
            self._database = ResponseDatabase(self._path, *self._limits)
        try:
            return work(self._database)
        except OSError as error:
            log.error("the store of responses cannot be used: %s", error)
            raise StoreFailed(f"the store of responses cannot be used: {error.strerror}") from error  # without its path
        except sqlite3.Error as error:
            raise StoreFailed(f"the store of responses cannot be used: {error}") from error
        finally:
            self._log_trouble(self._database.trouble)

    def _log_trouble(self, trouble: sqlite3.Error | None) -> None:
        """A line when it begins and one when it is over, however many responses are not kept meanwhile."""
        if trouble is not None and not self._has_trouble:
            log.error("responses cannot be kept: %s; answers say store: false until they can", trouble)
        elif trouble is None and self._has_trouble:
            log.info("responses can be kept again")
        self._has_trouble = trouble is not None
