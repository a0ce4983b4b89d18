"""The front end's end of the connection to the engine process."""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from quire.ipc.decoding import decode_events
from quire.ipc.framing import Frames, frame
from quire.ipc.messages import PORT_SHIFT, Command, Hello, PromptBlocks, ToFrontEnd
from quire.ipc.unix_transport import open_transport

RETRY_S = 0.05

OnMessages = Callable[[list[ToFrontEnd]], None]
Lost = Callable[[str], None]


class EngineClient(asyncio.Protocol):
    """A port to an engine in another process. Owned by the event loop.

    Calls `on_messages` with the messages of all frames that arrived together: a front end that is behind catches up by
    handling several steps at once. Calls `lost` once if the connection ends without `close`. Commands of one turn of
    the event loop are sent as one frame.
    """

    def __init__(self, number: int, on_messages: OnMessages, lost: Lost) -> None:
        self._number = number
        self.on_messages = on_messages
        self._lost = lost
        self._frames = Frames()
        self._unsent: list[Command | PromptBlocks] = []
        self._closed = False

    def request_id(self, count: int) -> int:
        return self._number << PORT_SHIFT | count

    def send(self, command: Command | PromptBlocks) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(command)

    def close(self) -> None:
        """End the connection. The engine aborts its requests."""
        self._closed = True
        self._transport.close()

    def _flush(self) -> None:
        commands, self._unsent = self._unsent, []
        if not self._transport.is_closing():
            self._transport.write(frame(commands))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(frame([Hello(self._number)]))

    def data_received(self, data: bytes) -> None:
        messages: list[ToFrontEnd] = []
        try:
            for payload in self._frames.feed(data):
                messages += decode_events(payload)
        except (ValueError, msgspec.MsgspecError) as error:
            self._transport.abort()
            self._end(f"the engine has sent an invalid message: {error}")
            return
        if messages:
            self.on_messages(messages)

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the engine process has ended" if error is None else f"the engine cannot be reached: {error}")

    def _end(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            self._lost(reason)


async def connect(address: str, number: int, on_messages: OnMessages, lost: Lost) -> EngineClient:
    """Connect to the engine as front end `number`, once its socket is there."""
    while True:
        line = socket.socket(socket.AF_UNIX)
        line.setblocking(False)
        try:
            line.connect(address)  # here, since not every event loop accepts a name without a file
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            line.close()
            await asyncio.sleep(RETRY_S)
        else:
            return await open_transport(lambda: EngineClient(number, on_messages, lost), line)
