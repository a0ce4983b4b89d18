"""Messages as bodies and as events."""

import secrets
from typing import Any

from quire.errors import QuireError
from quire.request import FinishReason as Finish
from quire.server.api.answer_reader import AnswerReader
from quire.server.api.anthropic.blocks import BlockEvents, merge_events
from quire.server.api.anthropic.errors import error_events
from quire.server.api.anthropic.requests import MessagesRequest, ThinkingAdaptive, ThinkingEnabled
from quire.server.api.anthropic.responses import AnthropicMessage, MessageDelta, MessageUsage, StopReason
from quire.server.http.sse import to_json
from quire.server.service.answers import Answer
from quire.server.service.ledger import ledger
from quire.server.service.open_prompt import TokenDelta
from quire.server.service.stream import Stream
from quire.text.answer_parts import AnswerForm

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessageEncoder:
    """Writes the answer to one request."""

    def __init__(self, fields: MessagesRequest, form: AnswerForm, model: str) -> None:
        self._fields = fields
        self._model = model
        self.form = form
        self._id = f"msg_{secrets.token_hex(12)}"

    def new_blocks(self) -> BlockEvents:
        thinking = self._fields.thinking
        asked = thinking if isinstance(thinking, (ThinkingEnabled, ThinkingAdaptive)) else None
        return BlockEvents(
            self.form,
            shows_thinking=asked is not None,
            omits_thoughts=asked is not None and asked.display == "omitted",
        )

    def events(self, stream: Stream) -> "MessageEvents":
        return MessageEvents(stream, self)

    def body(self, stream: Stream, answers: list[list[Answer]]) -> AnthropicMessage:
        ((answer,),) = answers
        reader, blocks = AnswerReader(self.form), self.new_blocks()
        pieces = reader.read_all(answer)
        message = self.begun(stream, reader)
        message["usage"]["output_tokens"] = stream.num_tokens
        message["content"] = merge_events([*blocks.push(pieces), *blocks.finish()])
        message["stop_reason"] = self.stop_reason(stream, answer.finish, reader.num_calls)
        message["stop_sequence"] = stream.prompts[0].samples[0].stop
        message.update(self._endings(stream))  # type: ignore[typeddict-item]
        return message

    def begun(self, stream: Stream, reader: AnswerReader) -> AnthropicMessage:
        """The message before its content."""
        usage = self.usage(stream, reader)
        usage |= {"output_tokens": 0, "service_tier": "standard"}
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def ended(self, stream: Stream, reader: AnswerReader, finish: Finish) -> MessageDelta:
        """The event after the content."""
        event: MessageDelta = {
            "type": "message_delta",
            "delta": {
                "stop_reason": self.stop_reason(stream, finish, reader.num_calls),
                "stop_sequence": stream.prompts[0].samples[0].stop,
            },
            "usage": self.usage(stream, reader),
        }
        event.update(self._endings(stream))  # type: ignore[typeddict-item]
        return event

    def usage(self, stream: Stream, reader: AnswerReader) -> MessageUsage:
        """No tokens are reported as written to the cache: every prompt is cached, without marks and without a price."""
        return {
            "input_tokens": stream.num_prompt_tokens - stream.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": stream.num_cached_tokens,
            "output_tokens": stream.num_tokens,
            "output_tokens_details": {"thinking_tokens": reader.num_reasoning_tokens},
        }

    def stop_reason(self, stream: Stream, finish: Finish, num_calls: int) -> StopReason:
        if finish is Finish.LENGTH:
            is_full = stream.prompts[0].request.max_tokens < self._fields.max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if num_calls:
            return "tool_use"
        return "stop_sequence" if finish is Finish.STOP_STRING else "end_turn"

    def _endings(self, stream: Stream) -> dict[str, Any]:
        endings: dict[str, Any] = {}
        if self._fields.context_management is not None:
            endings["context_management"] = {"applied_edits": []}
        if stream.arrival.wants_timings:
            endings["timings"] = ledger(stream)
        return endings


class MessageEvents:
    """The events of one message."""

    largest_event = 0

    def __init__(self, stream: Stream, encoder: MessageEncoder) -> None:
        self._stream = stream
        self._encoder = encoder
        self._reader = AnswerReader(encoder.form)
        self._blocks = encoder.new_blocks()
        self._has_begun = False
        self._finish = Finish.LENGTH

    def encode(self, deltas: list[TokenDelta]) -> bytes:
        begun = self._begin()
        events: list[Any] = []
        for delta in deltas:
            is_last = delta.finish is not None
            pieces = self._reader.read(delta.text, is_last=is_last, has_token=delta.token is not None)
            events += self._blocks.push(pieces)
            if delta.finish is not None:
                self._finish = delta.finish
                events += self._blocks.finish()
        return begun + b"".join(map(_event, events))

    def finish(self) -> bytes:
        return self._begin() + _event(self._encoder.ended(self._stream, self._reader, self._finish)) + STOP

    def fail(self, error: QuireError) -> bytes:
        return error_events(error)

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        begun = self._encoder.begun(self._stream, self._reader)
        return _event({"type": "message_start", "message": begun}) + PING


def _event(event: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event))
