"""Transports over local sockets that are connected already."""

import asyncio
import socket
from collections.abc import Callable
from typing import TypeVar

P = TypeVar("P", bound=asyncio.Protocol)


async def open_transport(make: Callable[[], P], line: socket.socket) -> P:
    """The protocol of a new transport over `line`, which belongs to it from now on.

    uvloop closes the descriptor itself. If the connection ends at once, or this call is cancelled, it does so without
    the socket object, which would close the same number a second time when it is deleted: by then another connection
    may have that number. So the object gives it up.
    """
    loop = asyncio.get_running_loop()
    protocol = make()
    try:
        await loop.create_unix_connection(lambda: protocol, sock=line)
    finally:
        if not isinstance(loop, asyncio.BaseEventLoop):  # its own loops close the object
            line.detach()
    return protocol
