"""Chat completions as bodies and as chunks."""

from quire.request import FinishReason as Finish
from quire.server.api.openai.dialect import OpenAIDialect
from quire.server.api.openai.envelope import Chunks, Envelope
from quire.server.api.openai.logprobs import chat_entry
from quire.server.api.openai.parts import AnswerParts
from quire.server.api.openai.requests import ChatRequest
from quire.server.api.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    FinishReason,
    MessagePart,
    Usage,
)
from quire.server.http.sse import to_json, token_template
from quire.server.service.answers import Answer
from quire.server.service.open_prompt import TokenDelta
from quire.server.service.served_model import ServedModel
from quire.server.service.stream import Stream
from quire.text.answer_parts import AnswerForm


class ChatEncoder:
    """Writes the answers to one chat."""

    def __init__(self, model: ServedModel, fields: ChatRequest, form: AnswerForm, dialect: OpenAIDialect) -> None:
        self._tokenizer = model.tokenizer
        self._fields = fields
        self._form = form
        self._dialect = dialect
        self._envelope = Envelope("chatcmpl", dialect, model.name_in_answers(fields.model), fields)

    def events(self, stream: Stream) -> "ChatEvents":
        if self._form.is_plain:
            return ChatEvents(stream, self._fields, self._envelope)
        return PartEvents(stream, self._fields, self._envelope, self._form)

    def body(self, stream: Stream, answers: list[list[Answer]]) -> ChatCompletion:
        parts = [AnswerParts(self._form) for _ in answers[0]]
        choices = [self._choice(*each) for each in zip(range(len(parts)), answers[0], parts, strict=True)]
        num_reasoning = sum(part.num_reasoning_tokens for part in parts) if self._form.thinking else None
        whole: ChatCompletion = {
            **self._envelope.head("chat.completion"),  # type: ignore[typeddict-item]  # mypy fears keys beyond a Head's
            "choices": choices,
            "usage": self._envelope.usage(stream, num_reasoning),
        }
        if self._fields.return_token_ids:
            whole["prompt_token_ids"] = list(stream.prompts[0].request.prompt)
        whole.update(self._envelope.timings(stream))  # type: ignore[typeddict-item]
        return whole

    def _choice(self, index: int, answer: Answer, parts: AnswerParts) -> ChatChoice:
        fields = self._fields
        choice: ChatChoice = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": None,
            "finish_reason": self._dialect.chat_finish_reasons[answer.finish],
        }
        if self._dialect.has_details:
            choice["message"]["refusal"] = None
        if not self._form.is_plain:
            choice["message"].update(parts.message(answer))  # type: ignore[typeddict-item]
            choice["finish_reason"] = parts.finish_reason(answer.finish, choice["finish_reason"])
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
        self._is_plain = not fields.logprobs and not fields.return_token_ids and not self._varies
        self._begun: set[int] = set()
        self._repeats_role = self._dialect.repeats_role
        role = b'"role":"assistant",' if self._repeats_role else b""
        end = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._plain = token_template(self._head + b'{"index":', b',"delta":{' + role + b'"content":', end)

    def encode(self, deltas: list[TokenDelta]) -> bytes:
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

    def _chunk(self, delta: TokenDelta) -> bytes:
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

    def _contents(self, delta: TokenDelta) -> list[MessagePart]:
        """OpenAI's deltas for one `TokenDelta`. The last one carries logprobs, token ids and the finish reason."""
        return [{"content": delta.text} if delta.text else {}]

    def _finish_reason(self, sample: int, finish: Finish) -> FinishReason:
        return self._dialect.chat_finish_reasons[finish]


class PartEvents(ChatEvents):
    """Chunks of a chat completion with parts: thinking, or tool calls."""

    def __init__(self, stream: Stream, fields: ChatRequest, envelope: Envelope, form: AnswerForm) -> None:
        super().__init__(stream, fields, envelope)
        self._has_thinking = form.thinking is not None
        self._parts = [AnswerParts(form) for _ in stream.prompts[0].samples]

    def encode(self, deltas: list[TokenDelta]) -> bytes:
        return b"".join([self._chunk(delta) for delta in deltas])

    def _contents(self, delta: TokenDelta) -> list[MessagePart]:
        parts, is_last = self._parts[delta.sample], delta.finish is not None
        return parts.deltas(delta.text, is_last=is_last, has_token=delta.token is not None) or [{}]

    def _finish_reason(self, sample: int, finish: Finish) -> FinishReason:
        return self._parts[sample].finish_reason(finish, super()._finish_reason(sample, finish))

    def _usage(self) -> Usage:
        num_reasoning = sum(parts.num_reasoning_tokens for parts in self._parts)
        return self._envelope.usage(self._stream, num_reasoning if self._has_thinking else None)
