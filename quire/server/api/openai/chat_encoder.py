"""Chat completions as bodies and as chunks."""

from quire.request import FinishReason as Finish
from quire.server.api.openai.dialect import OpenAIDialect
from quire.server.api.openai.envelope import Chunks, Envelope
from quire.server.api.openai.logprobs import chat_entry
from quire.server.api.openai.requests import ChatRequest
from quire.server.api.openai.responses import ChatChoice, ChatChunkChoice, ChatCompletion, FinishReason, MessagePart
from quire.server.api.openai.tools import Calls
from quire.server.api.tool_use import ToolUse
from quire.server.http.sse import to_json, token_template
from quire.server.service.answers import Answer
from quire.server.service.prompt import Delta
from quire.server.service.served_model import ServedModel
from quire.server.service.stream import Stream
from quire.text.tools import CallFormat


class ChatEncoder:
    """Writes the answers to one chat."""

    def __init__(self, model: ServedModel, fields: ChatRequest, tools: ToolUse | None, dialect: OpenAIDialect) -> None:
        self._tokenizer = model.tokenizer
        self._fields = fields
        self._tools = tools
        self._dialect = dialect
        self._envelope = Envelope("chatcmpl", dialect, model.name)

    def events(self, stream: Stream) -> "ChatEvents":
        if self._tools is None:
            return ChatEvents(stream, self._fields, self._envelope)
        return ToolEvents(stream, self._fields, self._envelope, self._tools.form)

    def body(self, stream: Stream, answers: list[list[Answer]]) -> ChatCompletion:
        whole: ChatCompletion = {
            **self._envelope.head("chat.completion"),  # type: ignore[typeddict-item]  # mypy fears keys beyond a Head's
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers[0])],
            "usage": self._envelope.usage(stream),
        }
        if self._fields.return_token_ids:
            whole["prompt_token_ids"] = list(stream.prompts[0].request.prompt)
        whole.update(self._envelope.timings(stream))  # type: ignore[typeddict-item]
        return whole

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        fields = self._fields
        choice: ChatChoice = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": None,
            "finish_reason": self._dialect.chat_finish_reasons[answer.finish],
        }
        if self._dialect.has_details:
            choice["message"]["refusal"] = None
        if self._tools is not None:
            calls = Calls(self._tools.form)
            choice["message"].update(calls.message(answer.text))  # type: ignore[typeddict-item]
            choice["finish_reason"] = calls.finish_reason(answer.finish, choice["finish_reason"])
        if fields.logprobs:
            pairs = zip(answer.tokens, answer.logprobs, strict=True)
            entries = [chat_entry(self._tokenizer, *pair, fields.top_logprobs or 0) for pair in pairs]
            choice["logprobs"] = {"content": entries, "refusal": None}
        if fields.return_token_ids:
            choice["token_ids"] = answer.tokens
        return choice


class ChatEvents(Chunks):
    """Chunks of a chat completion. Most of a plain chunk is the same bytes every time."""

    def __init__(self, stream: Stream, fields: ChatRequest, envelope: Envelope) -> None:
        super().__init__(stream, fields, envelope, "chat.completion.chunk")
        self._fields = fields
        self._tokenizer = stream.service.model.tokenizer
        self._is_plain = not fields.logprobs and not fields.return_token_ids
        self._begun: set[int] = set()
        self._repeats_role = self._dialect.repeats_role
        role = b'"role":"assistant",' if self._repeats_role else b""
        end = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._plain = token_template(self._head + b'{"index":', b',"delta":{' + role + b'"content":', end)

    def encode(self, deltas: list[Delta]) -> bytes:
        if not self._is_plain:
            return b"".join([self._chunk(delta) for delta in deltas])
        written = b""
        for delta in deltas:  # mostly one; this runs for every token
            _, sample, text, _, _, finish = delta
            if finish is not None or sample not in self._begun:
                written += self._chunk(delta)
            elif text:
                written += self._plain % (sample, to_json(text))
        return written

    def _chunk(self, delta: Delta) -> bytes:
        content: MessagePart = {"role": "assistant", "content": ""} if self._repeats_role else {}
        before = b""
        if delta.sample not in self._begun:
            self._begun.add(delta.sample)
            if not self._repeats_role:
                before = self._write(self._choice(delta.sample, {"role": "assistant", "content": ""}))
        *first, last = self._contents(delta)
        before += b"".join([self._write(self._choice(delta.sample, {**content, **one})) for one in first])
        content.update(last)
        choice = self._choice(delta.sample, content)
        if self._fields.logprobs and delta.logprobs is not None and delta.token is not None:
            entry = chat_entry(self._tokenizer, delta.token, delta.logprobs, self._fields.top_logprobs or 0)
            choice["logprobs"] = {"content": [entry], "refusal": None}
        if self._fields.return_token_ids:
            choice["token_ids"] = [] if delta.token is None else [delta.token]
        if not content and delta.finish is None and self._is_plain:
            return before
        if delta.finish is not None:
            choice["finish_reason"] = self._finish_reason(delta.sample, delta.finish)
        return before + self._write(choice)

    def _choice(self, sample: int, content: MessagePart) -> ChatChunkChoice:
        return {"index": sample, "delta": content, "logprobs": None, "finish_reason": None}

    def _contents(self, delta: Delta) -> list[MessagePart]:
        """OpenAI's deltas for one of ours. The last of them carries logprobs, token ids and the finish reason."""
        return [{"content": delta.text} if delta.text else {}]

    def _finish_reason(self, sample: int, finish: Finish) -> FinishReason:
        return self._dialect.chat_finish_reasons[finish]


class ToolEvents(ChatEvents):
    """Chunks of a chat completion in which tools may be called."""

    def __init__(self, stream: Stream, fields: ChatRequest, envelope: Envelope, form: CallFormat) -> None:
        super().__init__(stream, fields, envelope)
        self._calls = [Calls(form) for _ in stream.prompts[0].samples]

    def encode(self, deltas: list[Delta]) -> bytes:
        return b"".join([self._chunk(delta) for delta in deltas])

    def _contents(self, delta: Delta) -> list[MessagePart]:
        return self._calls[delta.sample].deltas(delta.text, is_last=delta.finish is not None) or [{}]

    def _finish_reason(self, sample: int, finish: Finish) -> FinishReason:
        return self._calls[sample].finish_reason(finish, super()._finish_reason(sample, finish))
