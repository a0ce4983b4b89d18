"""Responses as bodies and as events."""

import time
from typing import Any

import msgspec

from quire.errors import QuireError
from quire.request import FinishReason
from quire.server.api.answer_reader import AnswerReader
from quire.server.api.chat import PreparedChat
from quire.server.api.openai.errors import error_body
from quire.server.api.openai.logprobs import chat_entry
from quire.server.api.responses.items import new_id
from quire.server.api.responses.output import OpenMessage, Output
from quire.server.api.responses.requests import ENCRYPTED, ResponseRequest
from quire.server.api.responses.resources import ResponseUsage
from quire.server.http.sse import to_json
from quire.server.service.answers import Answer
from quire.server.service.ledger import ledger
from quire.server.service.open_prompt import TokenDelta
from quire.server.service.response_database import Item, KeptResponse
from quire.server.service.served_model import ServedModel
from quire.server.service.stream import Stream

_OVERLOADED = "rate_limit_error"


class ResponseEncoder:
    """Writes one response. The parts of it that repeat the request are encoded once."""

    def __init__(
        self,
        model: ServedModel,
        fields: ResponseRequest,
        prepared: PreparedChat,
        input: list[dict[str, Any]],
        *,
        is_stored: bool,
    ) -> None:
        self.id = new_id("resp")
        self.is_stored = is_stored
        self._fields = fields
        self._form = prepared.form
        self._tokenizer = model.tokenizer
        self._num_top = (fields.top_logprobs or 0) if prepared.fields.logprobs else None
        self._echo = msgspec.json.encode(self._repeated(model, prepared))[:-1]
        self._input = [Item(item["id"], msgspec.json.encode(item)) for item in input] if is_stored else []
        self._reader = AnswerReader(self._form)
        self.output = Output(
            self._form,
            is_streamed=bool(fields.stream),
            is_sealed=ENCRYPTED in (fields.include or []),
            pads=bool(fields.stream_options and fields.stream_options.include_obfuscation),
        )
        self._finish: FinishReason | None = None

    def begun(self, status: str) -> KeptResponse:
        """The response before it has output."""
        return self._kept(self._head(status, None))

    def read(self, text: str, token: int | None, logprobs: Any, finish: FinishReason | None) -> None:
        """Add one token of the answer to the output."""
        pieces = self._reader.read(text, is_last=finish is not None, has_token=token is not None)
        entry = None
        if self._num_top is not None and token is not None and logprobs is not None:
            entry = chat_entry(self._tokenizer, token, logprobs, self._num_top)
        self.output.add(pieces, entry)
        if finish is not None:
            self._finish = finish
            self.output.finish(is_cut=finish is FinishReason.LENGTH)

    @property
    def plain_message(self) -> OpenMessage | None:
        """The message that is open, where each further token only adds its text to it."""
        options = self._fields.stream_options
        is_plain = self._form.is_plain and self._num_top is None and not (options and options.include_obfuscation)
        return self.output.open_message if is_plain else None

    @property
    def is_finished(self) -> bool:
        return self._finish is not None

    @property
    def final_status(self) -> str:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def ended(self, stream: Stream) -> KeptResponse:
        """The response once its answer is complete."""
        return self._kept(self._head(self.final_status, stream))

    def failed(self, stream: Stream, error: QuireError) -> KeptResponse:
        return self._kept(self._head("failed", stream, error))

    def body(self, stream: Stream, answers: list[list[Answer]]) -> msgspec.Raw:
        if not self.is_finished:
            self._read_answer(answers[0][0])
        return msgspec.Raw(self.ended(stream).body)

    def _read_answer(self, answer: Answer) -> None:
        tokens: list[int | None] = [*answer.tokens]
        tokens += [None] * (len(answer.texts) - len(tokens))  # the last text may come without a token
        last = len(answer.texts) - 1
        for index, (text, token) in enumerate(zip(answer.texts, tokens, strict=True)):
            logprobs = answer.logprobs[index] if index < len(answer.logprobs) else None
            self.read(text, token, logprobs, answer.finish if index == last else None)

    def events(self, stream: Stream) -> "ResponseEvents":
        return ResponseEvents(self, stream)

    def _kept(self, head: bytes) -> KeptResponse:
        return KeptResponse(self.id, self._fields.previous_response_id, head, self._input, self.output.items)

    def _head(self, status: str, stream: Stream | None, error: QuireError | None = None) -> bytes:
        rest: dict[str, Any] = {
            "status": status,
            "store": self.is_stored,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if stream is None or error is not None else self._usage(stream),
        }
        if error is not None:
            is_overload = error_body(error)["error"]["type"] == _OVERLOADED
            code = "rate_limit_exceeded" if is_overload else "server_error"
            rest["error"] = {"code": code, "message": error.message}
        if stream is not None and stream.arrival.wants_timings:
            rest["timings"] = ledger(stream)
        return self._echo + b"," + msgspec.json.encode(rest)[1:]

    def _usage(self, stream: Stream) -> ResponseUsage:
        return {
            "input_tokens": stream.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": stream.num_cached_tokens},
            "output_tokens": stream.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": stream.num_prompt_tokens + stream.num_tokens,
        }

    def _repeated(self, model: ServedModel, prepared: PreparedChat) -> dict[str, Any]:
        fields, sampling = self._fields, prepared.spec.request.sampling
        reasoning, text = fields.reasoning, fields.text
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "background": bool(fields.background),
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata or {},
            "model": model.name_in_answers(fields.model),
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
            },
            "safety_identifier": fields.safety_identifier,
            "service_tier": "default",  # the only one there is
            "temperature": sampling.temperature,
            "text": {
                "format": text.format if text is not None and text.format is not None else {"type": "text"},
                "verbosity": text.verbosity if text is not None and text.verbosity is not None else "medium",
            },
            "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
            "tools": fields.tools or [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": fields.truncation or "disabled",
            "user": fields.user,
        }


class ResponseEvents:
    """The events of one response, numbered."""

    largest_event = 0

    def __init__(self, encoder: ResponseEncoder, stream: Stream) -> None:
        self._encoder = encoder
        self._stream = stream
        self._number = 0
        self._written: list[bytes] = []
        self._texts: list[str] = []  # of the message in which most tokens take a shorter way
        self._template: bytes | None = None

    def encode(self, deltas: list[TokenDelta]) -> bytes:
        self._begin()
        for delta in deltas:
            if self._template is not None and delta.finish is None:
                if delta.text:
                    self._texts.append(delta.text)
                    self._written.append(self._template % (self._number, to_json(delta.text)))
                    self._number += 1
                continue
            self._encoder.read(delta.text, delta.token, delta.logprobs, delta.finish)
            for event, fields in self._encoder.output.take_events():
                self._write(f"response.{event}", fields)
            message = self._encoder.plain_message
            if message is not None:
                self._texts = message.texts
                self._template = _delta_template(message)
        return self._take()

    def finish(self) -> bytes:
        self._write_response(self._encoder.final_status, self._encoder.ended(self._stream))
        return self._take()

    def fail(self, error: QuireError) -> bytes:
        self._begin()
        details = error_body(error)["error"]
        code = details["code"] or details["type"]
        self._write("error", {"code": code, "message": error.message, "param": error.param})
        self._write_response("failed", self._encoder.failed(self._stream, error))
        return self._take()

    def _begin(self) -> None:
        if not self._number:
            begun = self._encoder.begun("in_progress")
            self._write_response("created", begun)
            self._write_response("in_progress", begun)

    def _write_response(self, event: str, response: KeptResponse) -> None:
        self._write(f"response.{event}", {"response": msgspec.Raw(response.body)})

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        data = msgspec.json.encode({"type": event, "sequence_number": self._number, **fields})
        self._number += 1
        self._written.append(b"event: %b\ndata: %b\n\n" % (event.encode(), data))

    def _take(self) -> bytes:
        written, self._written = b"".join(self._written), []
        return written


def _delta_template(message: OpenMessage) -> bytes:
    """An event for `%`, in which only the number and the text change."""
    name = f"response.{message.delta_event}".encode()
    place = msgspec.json.encode(message.place)[1:-1]
    data = b'{"type":"%b","sequence_number":%%d,%b,"delta":%%b,"logprobs":[]}' % (name, place)
    return b"event: %b\ndata: %b\n\n" % (name, data)
