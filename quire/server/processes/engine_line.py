"""Keeps a front end connected to one engine."""

import asyncio
import logging
from typing import Protocol

from quire.ipc.client import RETRY_S, EngineClient, connect
from quire.ipc.messages import AdapterTable, Described, Ready, ToFrontEnd, Waiting

log = logging.getLogger(__name__)


class Listener(Protocol):
    """The front end as a line knows it."""

    def on_described(self, described: Described) -> None: ...

    def on_ready(self, line: "EngineLine") -> None: ...

    def on_waiting(self, line: "EngineLine", reason: str) -> None:
        """The engine cannot begin yet."""

    def on_lost(self, line: "EngineLine", reason: str) -> None:
        """The supervisor starts another engine, or sends GaveUp."""


class EngineLine:
    """Connects to an engine, and to the next one in its place whenever it ends. Owned by the event loop."""

    def __init__(self, engine: int, address: str, front_end: int, listener: Listener) -> None:
        """`engine` and `front_end` are numbers."""
        self.engine = engine
        self.client: EngineClient | None = None
        self.ready: Ready | None = None  # of the engine that is connected
        self.adapters: AdapterTable | None = None  # of that engine, before requests are sent to it
        self.was_lost = False  # after it was ready
        self._address = address
        self._front_end = front_end
        self._listener = listener
        self._is_lost = asyncio.Event()

    async def keep(self) -> None:
        """Keep the connection until cancelled."""
        while True:
            self._is_lost.clear()
            try:
                client = await connect(self._address, self._front_end, self._on_greetings, self._on_lost)
            except OSError as error:  # the engine ended at this moment
                log.warning("engine %d cannot be connected to: %s; trying again", self.engine, error)
                await asyncio.sleep(RETRY_S)
                continue
            if not self._is_lost.is_set():
                self.client = client
                if self.ready is not None:  # the message came before the client was known
                    self._listener.on_ready(self)
            await self._is_lost.wait()

    def close(self) -> None:
        if self.client is not None:
            self.client.close()

    def _on_greetings(self, messages: list[ToFrontEnd]) -> None:
        """Messages of an engine that is not ready yet, and those that came together with the last of them."""
        for count, message in enumerate(messages, start=1):
            if isinstance(message, Described):
                self._listener.on_described(message)
            elif isinstance(message, Waiting):
                self._listener.on_waiting(self, message.reason)
            elif isinstance(message, AdapterTable):
                self.adapters = message
            elif isinstance(message, Ready):
                self.ready = message
                client = self.client
                if client is not None:
                    self._listener.on_ready(self)
                    if client.on_messages != self._on_greetings:  # requests go there now, and the rest is for them
                        return client.on_messages(messages[count:])
        return None

    def _on_lost(self, reason: str) -> None:
        self.was_lost = self.was_lost or self.ready is not None
        self.client = self.ready = self.adapters = None
        self._is_lost.set()
        self._listener.on_lost(self, reason)
