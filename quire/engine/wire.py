"""What crosses the socket between the engine process and front ends: frames of msgpack, each a list of messages."""

import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from quire.engine.messages import Abort, Account, Failed, Progress, StepTrace, Submit

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 256 * 2**20


class Described(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the model is, once its files are found: a front end can read its tokenizer while the weights load."""

    name: str
    tokenizer: str | None  # the path of its folder or file
    end_ids: tuple[int, ...]
    generation: dict[str, float | int | bool | None]  # sampling that the files ask for


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A front end's first word: the number that its requests' ids begin with, which no other front end has.

    Its own and not the engine's to choose, so that a request has one id for as long as it lives, in one engine or more.
    """

    number: int


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine takes requests."""

    max_total_tokens: int
    platform: str


class Broken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine will not get ready, or cannot go on."""

    kind: str
    message: str


class Stats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How the engine is doing. Comes several times a second, so its absence says something too."""

    busy_s: float  # how long the step now under way has taken
    longest_step_s: float
    idle_s: float  # since the last step that finished
    num_running: int
    num_waiting: int
    running_max_tokens: int  # that the running sequences may ever have, prompts included
    free_pages: int
    cached_pages: int
    num_pages: int
    max_total_tokens: int  # of all that run together
    counters: dict[str, int]
    steps: dict[str, list[int]]  # counts by duration, by kind of step
    step_seconds: dict[str, float]
    batch_sizes: list[int]  # counts by rows that begin in a step
    batch_size_sum: int
    joined_by: dict[str, int]  # steps in which sequences began beside others that ran, by the rule that let them
    error: str | None
    step_limit_s: float | None  # how long a step may take by what others took; None when there were none
    is_compiling: bool  # the step under way had to wait for a program
    checking_s: float | None  # how long the device has been checked, or set up again


class Counts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one front end has counted, for the others: whichever is asked for metrics answers for all."""

    numbers: dict[str, int]
    histograms: dict[str, tuple[list[int], float]]  # counts by bucket, and the sum
    failures: dict[str, int]


class Others(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the other front ends have counted."""

    counts: list[Counts]


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request got its slot."""

    request_id: int
    queue_s: float


ToFrontEnd = Progress | Failed | Account | StepTrace | Started | Stats | Others | Described | Ready | Broken
ToEngine = Submit | Abort | Counts | Hello

_encoder = msgspec.msgpack.Encoder()
_event_decoder = msgspec.msgpack.Decoder(list[ToFrontEnd])
_command_decoder = msgspec.msgpack.Decoder(list[ToEngine])


def decode_events(payload: bytes) -> list[ToFrontEnd]:
    """Raises ValueError, of which msgspec's errors are kinds."""
    return _decode(_event_decoder, payload)


def decode_commands(payload: bytes) -> list[ToEngine]:
    """Raises ValueError, or InvalidRequest where a request's values are out of range."""
    return _decode(_command_decoder, payload)


def _decode(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except RecursionError as error:
        raise ValueError("a message is nested too deeply") from error


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
