"""Messages between engines and front ends, from the payloads of frames."""

from typing import TypeVar

import msgspec

from quire.ipc.messages import ToEngine, ToFrontEnd

T = TypeVar("T")

_event_decoder = msgspec.msgpack.Decoder(list[ToFrontEnd])
_command_decoder = msgspec.msgpack.Decoder(list[ToEngine])


def decode_events(payload: bytes) -> list[ToFrontEnd]:
    """Raises ValueError, of which msgspec's errors are kinds."""
    return _decode(_event_decoder, payload)


def decode_commands(payload: bytes) -> list[ToEngine]:
    """Raises ValueError, or InvalidRequest if a request's values are out of range."""
    return _decode(_command_decoder, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error
