"""POST /v1/completions."""

from typing import Any, Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest, shown
from quire.ipc.messages import TokenLogprobs
from quire.request import MAX_LOGPROBS, Grammar
from quire.server.api.grammars import grammar_of
from quire.server.api.openai.asking import Asking
from quire.server.api.openai.chunks import Chunks
from quire.server.api.openai.logprobs import completion_logprobs, token_name
from quire.server.api.openai.reply import FINISH_REASONS, Reply, usage
from quire.server.api.openai.requests import COMPLETION_REFUSALS, CompletionRequest
from quire.server.api.openai.responses import Completion, CompletionChoice
from quire.server.api.prompts import encode_texts
from quire.server.api.sampling import at_most, between
from quire.server.api.tgi import quirks
from quire.server.api.validation import typed
from quire.server.http.body import Body, read_json
from quire.server.http.sse import EventStream, first_deltas, to_json, token_template
from quire.server.service.answers import Answer, collect
from quire.server.service.arrival import Arrival
from quire.server.service.guided import guided
from quire.server.service.job import GenerationSpec
from quire.server.service.ledger import ledger
from quire.server.service.prompt import Delta, Prompt
from quire.server.service.service import Service
from quire.server.service.stream import Stream

DEFAULT_MAX_TOKENS = 16  # as OpenAI's documentation has it


async def completions(service: Service, request: Request) -> Response:
    return await answer_completion(service, request, await read_json(service, request))


async def answer_completion(service: Service, request: Request, body: Body) -> Response:
    if service.settings.tgi_strict and body.raw.get("stream") is True:
        return await quirks.as_event(service, _answer(service, request, body), native=False)
    return await _answer(service, request, body)


async def _answer(service: Service, request: Request, body: Body) -> Response:
    arrival = Arrival(request.headers, "completions")
    parsed = await service.offload.run(body.num_bytes, lambda: _parse(service, arrival, body.raw))
    fields, texts, n, best_of = parsed.fields, parsed.texts, parsed.n, parsed.best_of
    asked = [await guided(service, arrival, one, "response_format", parsed.grammar) for one in parsed.asked]
    arrival.wants_timings |= bool(fields.timings)
    stream = service.open(asked, arrival, user=fields.user)
    reply = Reply("cmpl", service, parsed.unknown)
    writer = ChoiceWriter(service, fields, texts)
    if fields.stream:
        encoder = CompletionEvents(stream, fields, reply, writer, n)
        return EventStream(stream, encoder, await first_deltas(stream, request.receive), reply.headers)
    by_prompt = await collect(stream, request.receive)

    def write() -> Completion:
        choices: list[CompletionChoice] = []
        for prompt, answers in zip(stream.prompts, by_prompt, strict=True):
            if best_of > n:
                answers.sort(key=lambda answer: -answer.mean_logprob)
            choices += [writer.whole(prompt, answer, len(choices) + i) for i, answer in enumerate(answers[:n])]
        whole: Completion = {
            **reply.head("text_completion"),  # type: ignore[typeddict-item]  # mypy fears keys that a Head has not
            "choices": choices,
            "usage": usage(stream),
        }
        if arrival.wants_timings:
            whole["timings"] = ledger(stream)
        return whole

    return await reply.whole(write, stream, sum(map(len, texts)), fields.logprobs or 0)


class ParsedCompletion(NamedTuple):
    fields: CompletionRequest
    unknown: list[str]  # names of fields that nothing knows
    n: int
    best_of: int
    texts: list[str]  # the prompts
    asked: list[GenerationSpec]  # of the engine, but for a grammar
    grammar: Grammar | None


def _parse(service: Service, arrival: Arrival, raw: dict[str, Any]) -> ParsedCompletion:
    """Everything about a completion that takes longer the longer it is."""
    fields, unknown = typed(raw, CompletionRequest, COMPLETION_REFUSALS, strict=service.settings.strict)
    if service.settings.tgi_strict:
        fields, _ = quirks.as_read(fields)
    n = 1 if fields.n is None else fields.n
    between("n", n, 1, service.settings.max_best_of)
    best_of = n if fields.best_of is None else fields.best_of
    between("best_of", best_of, n, service.settings.max_best_of)
    if best_of > n and fields.stream:
        raise InvalidRequest.for_field(
            "best_of", f"is {best_of} and n is {n}; answers that are chosen among cannot be streamed"
        )
    if fields.logprobs is not None:
        between("logprobs", fields.logprobs, 0, MAX_LOGPROBS)
    asking = Asking(
        fields,
        service.model,
        service.settings,
        max_tokens=_max_tokens(service, fields),
        logprobs=0 if best_of > n and fields.logprobs is None else fields.logprobs,
        samples=best_of,
        prompt_logprobs=fields.logprobs if fields.echo else None,
    )
    with arrival.tokenising():
        texts, prompts = _prompts(service, fields.prompt)
    grammar = grammar_of("response_format", fields.response_format)
    asked = [asking.prompt(tokens, number) for number, tokens in enumerate(prompts)]
    return ParsedCompletion(fields, unknown, n, best_of, texts, asked, grammar)


def _max_tokens(service: Service, fields: CompletionRequest) -> int | None:
    if fields.max_tokens is None:
        return None if service.settings.tgi_strict else DEFAULT_MAX_TOKENS
    if fields.max_tokens < 0 or (fields.max_tokens == 0 and not fields.echo):
        raise InvalidRequest.for_field(
            "max_tokens", f"is {fields.max_tokens}; it must be at least 1, or with echo at least 0"
        )
    return fields.max_tokens


def _prompts(service: Service, given: str | list[Any]) -> tuple[list[str], list[list[int]]]:
    """The prompts as text and as tokens: a text, tokens, or a list of either."""
    model = service.model
    if isinstance(given, str):
        given = [given]
    if not given:
        raise InvalidRequest.for_field("prompt", "is []; it must hold at least one text or token")
    if all(type(item) is int for item in given):
        given = [given]
    at_most("the number of prompts", len(given), service.settings.max_client_batch_size, param="prompt")
    if all(isinstance(item, str) for item in given):
        return given, encode_texts(model, given)
    for index, item in enumerate(given):
        if not (isinstance(item, list) and item and all(type(token) is int for token in item)):
            raise InvalidRequest.for_field(
                f"prompt[{index}]", f"is {shown(item)}; prompts are all texts, or all non-empty lists of token ids"
            )
        model.check_prompt(item)
        model.tokenizer.check_ids(item, param=f"prompt[{index}]")
    return [model.tokenizer.decode(item, skip_special_tokens=False) for item in given], given


class ChoiceWriter:
    """The choices of one request's answers."""

    def __init__(self, service: Service, fields: CompletionRequest, texts: list[str]) -> None:
        self._tokenizer = service.model.tokenizer
        self._fields = fields
        self._texts = texts
        self._finish_reasons = quirks.COMPLETION_FINISH_REASONS if service.settings.tgi_strict else FINISH_REASONS
        self.unfinished: Literal[""] | None = "" if service.settings.tgi_strict else None

    @property
    def num_characters(self) -> int:
        """Of the prompts."""
        return sum(map(len, self._texts))

    def whole(self, prompt: Prompt, answer: Answer, index: int) -> CompletionChoice:
        fields = self._fields
        number = prompt.index
        text = self._texts[number] + answer.text if fields.echo else answer.text
        logprobs = None
        if fields.logprobs is not None:
            tokens = list(answer.tokens)
            scores: list[TokenLogprobs | None] = list(answer.logprobs)
            if fields.echo:
                tokens = [*prompt.request.prompt, *tokens]
                scores = [None, *prompt.logprobs, *scores]
            logprobs = completion_logprobs(self._tokenizer, tokens, scores, fields.logprobs)
        choice: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._finish_reasons[answer.finish],
        }
        if fields.return_token_ids:
            choice["token_ids"] = answer.tokens
            choice["prompt_token_ids"] = list(prompt.request.prompt)
        return choice

    def echoed(self, prompt: Prompt, index: int) -> CompletionChoice:
        """The prompt itself, as the first chunk of a stream."""
        logprobs = None
        if self._fields.logprobs is not None:
            scores: list[TokenLogprobs | None] = [None, *prompt.logprobs]
            logprobs = completion_logprobs(self._tokenizer, prompt.request.prompt, scores, self._fields.logprobs)
        text = self._texts[prompt.index]
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self.unfinished}

    def part(self, delta: Delta, index: int, offset: int) -> CompletionChoice:
        logprobs = None
        if self._fields.logprobs is not None and delta.token is not None:
            logprobs = completion_logprobs(
                self._tokenizer, [delta.token], [delta.logprobs], self._fields.logprobs, offset
            )
        choice: CompletionChoice = {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": self.unfinished if delta.finish is None else self._finish_reasons[delta.finish],
        }
        if self._fields.return_token_ids:
            choice["token_ids"] = [] if delta.token is None else [delta.token]
        return choice

    def length(self, tokens: tuple[int, ...]) -> int:
        """Characters that tokens stand for, as offsets count them."""
        return sum(len(token_name(self._tokenizer, token)) for token in tokens)


class CompletionEvents(Chunks):
    """Chunks of a completion."""

    def __init__(self, stream: Stream, fields: CompletionRequest, reply: Reply, writer: ChoiceWriter, n: int) -> None:
        super().__init__(stream, fields, reply, "text_completion")
        self._fields = fields
        self._writer = writer
        self._n = n
        if fields.echo:  # the prompt with its log-probabilities is one event
            self.largest_event = stream.num_prompt_tokens * (1 + (fields.logprobs or 0)) + writer.num_characters
        self._is_plain = fields.logprobs is None and not fields.return_token_ids
        self._offsets: dict[int, int] = {}  # characters so far, by choice; a choice is in it once it has begun
        end = b',"logprobs":null,"finish_reason":' + msgspec.json.encode(writer.unfinished) + b"}" + self._tail
        self._plain = token_template(self._head + b'{"index":', b',"text":', end)

    def encode(self, deltas: list[Delta]) -> bytes:
        if not self._is_plain:
            return b"".join([self._chunk(delta) for delta in deltas])
        written = b""
        for delta in deltas:  # mostly one; this runs for every token
            prompt, sample, text, _, _, ending = delta
            index = prompt * self._n + sample
            if ending is not None or index not in self._offsets:
                written += self._chunk(delta)
            elif text:
                written += self._plain % (index, to_json(text))
        return written

    def _chunk(self, delta: Delta) -> bytes:
        index = delta.prompt * self._n + delta.sample
        before = b""
        if index not in self._offsets:
            prompt = self._stream.prompts[delta.prompt]
            self._offsets[index] = self._writer.length(prompt.request.prompt) if self._fields.echo else 0
            if self._fields.echo:
                before = self._write(self._writer.echoed(prompt, index))
        if self._is_plain and not delta.text and delta.finish is None:
            return before
        written = self._write(self._writer.part(delta, index, self._offsets[index]))
        if self._fields.logprobs is not None and delta.token is not None:
            self._offsets[index] += self._writer.length((delta.token,))
        return before + written
