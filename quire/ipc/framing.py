"""Frames of msgpack, each a list of messages."""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 2**20

_encoder = msgspec.msgpack.Encoder()


def frame(messages: Sequence[Any]) -> bytes:
    payload = _encoder.encode(messages)
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts a stream of bytes into the payloads of frames."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes."""
        held = self._held
        held += data
        payloads: list[bytes] = []
        at = 0
        while len(held) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame has {length} bytes; the limit is {MAX_FRAME_BYTES}")
            end = at + _LENGTH.size + length
            if len(held) < end:
                break
            payloads.append(bytes(held[at + _LENGTH.size : end]))
            at = end
        del held[:at]
        return payloads
