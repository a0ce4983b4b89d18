"""One end of an authenticated connection, as between the leader and another member of a group."""

import contextlib
import hashlib
import hmac
import logging
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from quire.group.handshake import Keys

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FRAME_BYTES = 64 * 2**20
SILENCE_S = 10.0  # after which the other end is lost; it says something every PING_S
PING_S = 2.0
TAG_BYTES = 16
COPIED_BYTES = 65_536  # shorter frames are sent by one call
_IS_BYTES = 1 << 31  # in the length of a frame that is no message
_LENGTH = struct.Struct("<I")
_COUNT = struct.Struct("<Q")
_HEADER_BYTES = _LENGTH.size + TAG_BYTES

_encode = msgspec.msgpack.Encoder().encode


class LinkLost(Exception):
    """The connection has ended."""


class Link(Generic[T]):
    """Sends messages from any thread, and hands those of the other end to `take` on a thread of its own.

    A frame is a length, a tag and a message, or bytes that are no message. The tag covers them and their place in the
    stream. `lost` is called once, on that thread or on one that sends.
    """

    def __init__(self, connection: socket.socket, keys: Keys, messages: Any, silence_s: float = SILENCE_S) -> None:
        """`messages` are the types that the other end may send. It is lost after `silence_s` without a byte."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(silence_s)
        self._connection = connection
        self._silence_s = silence_s
        self._keys = keys
        self._decode = msgspec.msgpack.Decoder(messages).decode
        self._sending = threading.Lock()
        self._num_sent = self._num_received = 0
        self._ending = threading.Lock()  # held for good by the thread that finds the end
        self._take: Callable[[T], None] = lambda message: None
        self._lost: Callable[[str], None] = lambda reason: None

    @property
    def peer(self) -> str:
        try:
            return str(self._connection.getpeername()[0])
        except OSError:
            return "?"

    def allow_silence(self, silence_s: float) -> None:
        """Set the silence after which the other end is lost. Called before `start`."""
        self._silence_s = silence_s
        self._connection.settimeout(silence_s)

    def start(self, take: Callable[[T], None], lost: Callable[[str], None]) -> None:
        """Read from now on."""
        self._take, self._lost = take, lost
        threading.Thread(target=self._read, name="quire-link", daemon=True).start()

    def send(self, message: Any) -> None:
        """Raises LinkLost, after `lost` was called."""
        payload = _encode(message)
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a message has {len(payload)} bytes; the limit is {MAX_FRAME_BYTES}")
        self._send(len(payload), payload)

    def send_bytes(self, data: memoryview) -> None:
        """Bytes that are no message, as they are. Raises LinkLost, after `lost` was called."""
        self._send(len(data) | _IS_BYTES, data)

    def _send(self, length: int, payload: bytes | memoryview) -> None:
        try:
            with self._sending:
                header = _LENGTH.pack(length) + _tag(self._keys.ours, self._num_sent, payload)
                self._num_sent += 1
                if len(payload) < COPIED_BYTES:
                    self._connection.sendall(header + bytes(payload))
                else:
                    self._connection.sendall(header)
                    self._connection.sendall(payload)
        except OSError as error:
            self._end(self._reason(error))
            raise LinkLost(self._reason(error)) from error

    def receive(self) -> T:
        """The next message, for an end that has not called `start`. Raises LinkLost."""
        received = self.receive_into(memoryview(b""))
        if isinstance(received, int):
            raise LinkLost("bytes came in place of a message")
        return received

    def receive_into(self, buffer: memoryview) -> T | int:
        """The next message; or the number of bytes that came instead, which are at the beginning of `buffer` now.
        Raises LinkLost."""
        try:
            header = self._exactly(memoryview(bytearray(_HEADER_BYTES)))
            (length,) = _LENGTH.unpack_from(header)
            is_bytes, length = length & _IS_BYTES, length & ~_IS_BYTES
            most = len(buffer) if is_bytes else MAX_FRAME_BYTES
            if length > most:
                raise LinkLost(f"a frame has {length} bytes; the limit is {most}")
            payload = self._exactly(buffer[:length] if is_bytes else memoryview(bytearray(length)))
            tag = _tag(self._keys.theirs, self._num_received, payload)
            if not hmac.compare_digest(bytes(header[_LENGTH.size :]), tag):
                raise LinkLost("a frame was altered on its way")
            self._num_received += 1
            if is_bytes:
                return int(length)
            message: T = self._decode(payload)
        except OSError as error:
            raise LinkLost(self._reason(error)) from error
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise LinkLost(f"a message cannot be read: {error}") from error
        return message

    def close(self) -> None:
        """`lost` is not called any more."""
        self._ending.acquire(blocking=False)
        self._shut()

    def _read(self) -> None:
        while True:
            try:
                message = self.receive()
            except LinkLost as error:
                self._end(str(error))
                return
            self._take(message)

    def _exactly(self, view: memoryview) -> memoryview:
        at = 0
        while at < len(view):
            received = self._connection.recv_into(view[at:])
            if not received:
                raise LinkLost("the connection was closed")
            at += received
        return view

    def _end(self, reason: str) -> None:
        if self._ending.acquire(blocking=False):
            self._shut()
            self._lost(reason)

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._connection.close()

    def _reason(self, error: OSError) -> str:
        if isinstance(error, TimeoutError):
            return f"it has not been heard of for {self._silence_s:g} s"
        return f"the connection ended: {error.strerror or error}"


def _tag(key: bytes, number: int, payload: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(_COUNT.pack(number), key=key, digest_size=TAG_BYTES)
    digest.update(payload)
    return digest.digest()
