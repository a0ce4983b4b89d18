"""Listening sockets."""

import socket
from errno import EACCES, EADDRINUSE

from quire.errors import AddressUnavailable, InvalidSetting

BACKLOG = 4096  # connections that wait to be accepted


def open_listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` sockets that share a port; a free one where `port` is 0."""
    first = open_listener(host, port, shared=False)  # not shared at first: it may be in use by another program
    if count == 1:
        return [first]
    port = first.getsockname()[1]
    first.close()
    return [open_listener(host, port, shared=True) for _ in range(count)]


def open_listener(host: str, port: int, *, shared: bool) -> socket.socket:
    """`shared`: other workers may listen on the same port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # at once: bound sockets that do not listen yet may have the same port
    except OSError as error:
        listener.close()
        kind = AddressUnavailable if error.errno in (EADDRINUSE, EACCES) else InvalidSetting
        raise kind(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener
