"""The fields of OpenAI's answers besides their choices."""

import secrets
import time
from typing import Any, Literal

import msgspec

from quire.errors import QuireError
from quire.server.api.openai.dialect import OpenAIDialect
from quire.server.api.openai.requests import SamplingFields, StreamOptions
from quire.server.api.openai.responses import ChatChunkChoice, CompletionChoice, Head, Usage
from quire.server.service.ledger import Timings, ledger
from quire.server.service.stream import Stream

DONE = b"data: [DONE]\n\n"
PADDED_BYTES = 64  # most tokens are shorter
Kind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


def padding(num_bytes: int) -> str:
    """Random characters that fill `num_bytes` up to a multiple of `PADDED_BYTES`."""
    return secrets.token_hex(PADDED_BYTES)[: -num_bytes % PADDED_BYTES]


class Envelope:
    """The first and last fields, which all answers and chunks of one request share."""

    def __init__(self, prefix: str, dialect: OpenAIDialect, model: str, fields: SamplingFields) -> None:
        self.dialect = dialect
        self._has_tier = fields.service_tier is not None
        self._id = f"{prefix}-{secrets.token_hex(12)}" if dialect.has_details else ""
        self._created = int(time.time())
        self._model = model

    def head(self, kind: Kind) -> Head:
        head: Head = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self.dialect.fingerprint,
        }
        if self._has_tier:
            head["service_tier"] = "default"  # the only one there is
        return head

    def usage(self, stream: Stream, num_reasoning_tokens: int | None = None) -> Usage:
        """`num_reasoning_tokens`: None where the model does not think."""
        counts: Usage = {
            "prompt_tokens": stream.num_prompt_tokens,
            "completion_tokens": stream.num_tokens,
            "total_tokens": stream.num_prompt_tokens + stream.num_tokens,
        }
        if self.dialect.has_details:
            counts["prompt_tokens_details"] = {"cached_tokens": stream.num_cached_tokens}
            if num_reasoning_tokens is not None:
                counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
        return counts

    def timings(self, stream: Stream) -> dict[str, Timings]:
        return {"timings": ledger(stream)} if stream.arrival.wants_timings else {}


class Chunks:
    """The parts that chunks of chats and of completions share. Only the choice changes from chunk to chunk."""

    largest_event = 0

    def __init__(self, stream: Stream, fields: SamplingFields, envelope: Envelope, kind: Kind) -> None:
        self._stream = stream
        self._envelope = envelope
        self._dialect = envelope.dialect
        options = fields.stream_options or StreamOptions()
        self._has_usage = bool(options.include_usage)
        self._counts_on = bool(options.continuous_usage_stats)
        self._pads = bool(options.include_obfuscation)
        self._varies = self._counts_on or self._pads  # else every chunk has the same tail
        self._head = b"data: " + msgspec.json.encode(envelope.head(kind))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def _write(self, choice: ChatChunkChoice | CompletionChoice) -> bytes:
        before = self._head + msgspec.json.encode(choice)
        return before + self._varying_tail(before) if self._varies else before + self._tail

    def _varying_tail(self, before: bytes) -> bytes:
        if self._counts_on:
            more: dict[str, Any] = {"usage": self._envelope.usage(self._stream)}
        else:
            more = {"usage": None} if self._has_usage else {}
        return self._closed(before, more)

    def _closed(self, before: bytes, more: dict[str, Any]) -> bytes:
        """The end of a chunk. With padding, chunks differ in length by multiples of `PADDED_BYTES` only."""
        if self._pads:
            num_bytes = len(before) + len(msgspec.json.encode(more | {"obfuscation": ""}))
            more["obfuscation"] = padding(num_bytes)
        return b"]," + msgspec.json.encode(more)[1:] + b"\n\n"

    def finish(self) -> bytes:
        more: dict[str, Any] = {"usage": self._usage()} if self._has_usage else {}
        more |= self._envelope.timings(self._stream)
        return (self._head + self._closed(self._head, more) if more else b"") + DONE

    def _usage(self) -> Usage:
        return self._envelope.usage(self._stream)

    def fail(self, error: QuireError) -> bytes:
        return self._dialect.error_events(error)
