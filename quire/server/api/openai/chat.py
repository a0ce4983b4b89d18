"""POST /v1/chat/completions."""

from dataclasses import replace
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest
from quire.request import FinishReason as Finish
from quire.request import Grammar
from quire.server.api.grammars import grammar_of
from quire.server.api.openai.asking import Asking
from quire.server.api.openai.chunks import Chunks
from quire.server.api.openai.logprobs import chat_entry
from quire.server.api.openai.reply import FINISH_REASONS, Reply, usage
from quire.server.api.openai.requests import CHAT_REFUSALS, ChatRequest
from quire.server.api.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    FinishReason,
    MessagePart,
)
from quire.server.api.openai.tool_use import Calls, ToolUse, tool_use
from quire.server.api.prompts import encode_conversation
from quire.server.api.tgi import quirks
from quire.server.api.validation import typed
from quire.server.http.body import Body, read_json
from quire.server.http.sse import EventStream, first_deltas, to_json, token_template
from quire.server.service.answers import Answer, collect
from quire.server.service.arrival import Arrival
from quire.server.service.guided import guided
from quire.server.service.job import GenerationSpec
from quire.server.service.ledger import ledger
from quire.server.service.prompt import Delta
from quire.server.service.service import Service
from quire.server.service.stream import Stream
from quire.text.shield import Prompt
from quire.text.tools import CallFormat

TOOL_CALLS: Final = "tool_calls"  # as a reason to finish


async def chat_completions(service: Service, request: Request) -> Response:
    return await answer_chat(service, request, await read_json(service, request))


async def answer_chat(service: Service, request: Request, body: Body) -> Response:
    if service.settings.tgi_strict and body.raw.get("stream") is True:
        return await quirks.as_event(service, _answer(service, request, body), native=False)
    return await _answer(service, request, body)


async def _answer(service: Service, request: Request, body: Body) -> Response:
    arrival = Arrival(request.headers, "chat_completions")
    parsed = await service.offload.run(body.num_bytes, lambda: parse_chat(service, arrival, body.raw))
    fields, tools, unknown = parsed.fields, parsed.tools, parsed.unknown
    asked = await guided_chat(service, arrival, parsed)
    arrival.wants_timings |= bool(fields.timings)
    stream = service.open([asked], arrival, user=fields.user)
    reply = Reply("chatcmpl", service, unknown)
    if fields.stream:
        encoder = ChatEvents(stream, fields, reply) if tools is None else ToolEvents(stream, fields, reply, tools.form)
        return EventStream(stream, encoder, await first_deltas(stream, request.receive), reply.headers)
    (answers,) = await collect(stream, request.receive)

    def write() -> ChatCompletion:
        whole: ChatCompletion = {
            **reply.head("chat.completion"),  # type: ignore[typeddict-item]  # mypy fears keys that a Head has not
            "choices": [_choice(service, fields, tools, index, answer) for index, answer in enumerate(answers)],
            "usage": usage(stream),
        }
        if fields.return_token_ids:
            whole["prompt_token_ids"] = list(asked.request.prompt)
        if arrival.wants_timings:
            whole["timings"] = ledger(stream)
        return whole

    return await reply.whole(write, stream, len(parsed.text), fields.top_logprobs or 0)


class ParsedChat(NamedTuple):
    fields: ChatRequest
    unknown: list[str]  # names of fields that nothing knows
    tools: ToolUse | None
    asked: GenerationSpec  # of the engine, but for a grammar
    text: str  # the conversation as the template has it
    grammar: Grammar | None


def parse_chat(service: Service, arrival: Arrival, raw: dict[str, Any]) -> ParsedChat:
    """Everything about a chat that takes longer the longer it is."""
    fields, unknown = typed(raw, ChatRequest, CHAT_REFUSALS, strict=service.settings.strict)
    if service.settings.tgi_strict:
        fields, unread = quirks.as_read(fields)
        unknown += unread
    tools = tool_use(fields, service.model)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidRequest.for_field("top_logprobs", f"is {fields.top_logprobs}; it needs logprobs to be true")
    max_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest.for_field("max_tokens", f"is {max_tokens}; it must be at least 1")
    asking = Asking(
        fields,
        service.model,
        service.settings,
        max_tokens=max_tokens,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        samples=1 if fields.n is None else fields.n,
    )
    with arrival.tokenising():
        prompt, tokens = encode_chat(service, fields, tools)
    asked = asking.prompt(tokens)
    grammar = grammar_of("response_format", fields.response_format)
    if tools is not None and grammar is not None:
        raise InvalidRequest.for_field("response_format", "and tools are both set; an answer can follow one of them")
    if tools is not None and tools.shows_special:
        asked = replace(asked, skip_special_tokens=False)
    return ParsedChat(fields, unknown, tools, asked, prompt.text, grammar)


async def guided_chat(service: Service, arrival: Arrival, parsed: ParsedChat) -> GenerationSpec:
    """What the engine is asked."""
    tools = parsed.tools
    if tools is None:
        return await guided(service, arrival, parsed.asked, "response_format", parsed.grammar)
    return await guided(service, arrival, parsed.asked, "tools", tools.grammar, tools.checked)


def encode_chat(service: Service, fields: ChatRequest, tools: ToolUse | None) -> tuple[Prompt, list[int]]:
    """The conversation as the template has it, and the tokens of that."""
    continues = bool(fields.continue_final_message)
    return encode_conversation(
        service,
        fields.messages,
        tools=tools,
        tool_prompt=None if tools is None else fields.tool_prompt,
        add_generation_prompt=not continues if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continue_final_message=continues,
        documents=fields.documents,
        variables=fields.chat_template_kwargs,
    )


def _choice(service: Service, fields: ChatRequest, tools: ToolUse | None, index: int, answer: Answer) -> ChatChoice:
    choice: ChatChoice = {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": None,
        "finish_reason": FINISH_REASONS[answer.finish],
    }
    if service.settings.tgi_strict:
        del choice["message"]["refusal"]
        choice["finish_reason"] = quirks.CHAT_FINISH_REASONS[answer.finish]
    if tools is not None:
        calls = Calls(tools.form)
        found = calls.message(answer.text)
        choice["message"]["content"] = found["content"]
        if "tool_calls" in found:
            choice["message"]["tool_calls"] = found["tool_calls"]
        if calls.has_any and answer.finish is not Finish.LENGTH:
            choice["finish_reason"] = TOOL_CALLS
    if fields.logprobs:
        pairs = zip(answer.tokens, answer.logprobs, strict=True)
        choice["logprobs"] = {
            "content": [chat_entry(service.model.tokenizer, *pair, fields.top_logprobs or 0) for pair in pairs],
            "refusal": None,
        }
    if fields.return_token_ids:
        choice["token_ids"] = answer.tokens
    return choice


class ChatEvents(Chunks):
    """Chunks of a chat completion. Most of a plain chunk is the same bytes every time."""

    def __init__(self, stream: Stream, fields: ChatRequest, reply: Reply) -> None:
        super().__init__(stream, fields, reply, "chat.completion.chunk")
        self._fields = fields
        self._tokenizer = stream.service.model.tokenizer
        self._is_plain = not fields.logprobs and not fields.return_token_ids
        self._begun: set[int] = set()
        self._finish_reasons = quirks.CHAT_FINISH_REASONS if self._as_tgi else FINISH_REASONS
        role = b'"role":"assistant",' if self._as_tgi else b""  # it is named in every chunk there
        end = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._plain = token_template(self._head + b'{"index":', b',"delta":{' + role + b'"content":', end)

    def encode(self, deltas: list[Delta]) -> bytes:
        if not self._is_plain:
            return b"".join([self._chunk(delta) for delta in deltas])
        written = b""
        for delta in deltas:  # mostly one; this runs for every token
            _, sample, text, _, _, ending = delta
            if ending is not None or sample not in self._begun:
                written += self._chunk(delta)
            elif text:
                written += self._plain % (sample, to_json(text))
        return written

    def _chunk(self, delta: Delta) -> bytes:
        content: MessagePart = {"role": "assistant", "content": ""} if self._as_tgi else {}
        before = b""
        if delta.sample not in self._begun:
            self._begun.add(delta.sample)
            if not self._as_tgi:
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
        """What a delta of ours comes to in theirs: one after the other, the last of them with all else."""
        return [{"content": delta.text} if delta.text else {}]

    def _finish_reason(self, sample: int, ending: Finish) -> FinishReason:
        return self._finish_reasons[ending]


class ToolEvents(ChatEvents):
    """Chunks of a chat completion in which tools may be called."""

    def __init__(self, stream: Stream, fields: ChatRequest, reply: Reply, form: CallFormat) -> None:
        super().__init__(stream, fields, reply)
        self._calls = [Calls(form) for _ in stream.prompts[0].samples]

    def encode(self, deltas: list[Delta]) -> bytes:
        return b"".join([self._chunk(delta) for delta in deltas])

    def _contents(self, delta: Delta) -> list[MessagePart]:
        return self._calls[delta.sample].deltas(delta.text, is_last=delta.finish is not None) or [{}]

    def _finish_reason(self, sample: int, ending: Finish) -> FinishReason:
        called = self._calls[sample].has_any and ending is not Finish.LENGTH
        return TOOL_CALLS if called else super()._finish_reason(sample, ending)
