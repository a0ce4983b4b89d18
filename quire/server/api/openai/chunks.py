"""The chunks of an OpenAI stream."""

from typing import Any, Literal

import msgspec

from quire.errors import QuireError
from quire.server.api.openai.errors import error_body
from quire.server.api.openai.reply import Reply, usage
from quire.server.api.openai.requests import Sampled
from quire.server.api.openai.responses import ChatChunkChoice, CompletionChoice
from quire.server.api.tgi import quirks
from quire.server.service.ledger import ledger
from quire.server.service.stream import Stream

DONE = b"data: [DONE]\n\n"


class Chunks:
    """The parts that chunks of chats and of completions have in common. Of a chunk only the choice changes."""

    largest_event = 0

    def __init__(
        self, stream: Stream, fields: Sampled, reply: Reply, kind: Literal["chat.completion.chunk", "text_completion"]
    ) -> None:
        self._stream = stream
        self._as_tgi = stream.service.settings.tgi_strict
        self._usage = bool(fields.stream_options and fields.stream_options.include_usage)
        self._head = b"data: " + msgspec.json.encode(reply.head(kind))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def _write(self, choice: ChatChunkChoice | CompletionChoice) -> bytes:
        return self._head + msgspec.json.encode(choice) + self._tail

    def finish(self) -> bytes:
        last = b""
        wants_timings = self._stream.arrival.wants_timings
        if self._usage or wants_timings:
            more: dict[str, Any] = {"usage": usage(self._stream)} if self._usage else {}
            if wants_timings:
                more["timings"] = ledger(self._stream)
            last = self._head + b"]," + msgspec.json.encode(more)[1:] + b"\n\n"
        return last + DONE

    def fail(self, error: QuireError) -> bytes:
        if self._as_tgi:
            return quirks.openai_event(error) + DONE
        return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"
