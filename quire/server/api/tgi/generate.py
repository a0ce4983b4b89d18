"""POST /, /generate, /generate_stream and /invocations."""

from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest
from quire.request import Grammar
from quire.server.api.grammars import grammar_of
from quire.server.api.openai.chat import answer_chat
from quire.server.api.openai.completions import answer_completion
from quire.server.api.openai.reply import ignored_header
from quire.server.api.prompts import encode_texts
from quire.server.api.tgi import quirks
from quire.server.api.tgi.asking import ask, check, is_sampled
from quire.server.api.tgi.details import sequence_details
from quire.server.api.tgi.events import GenerateEvents
from quire.server.api.tgi.requests import PARAMETER_REFUSALS, GenerateRequest, Parameters
from quire.server.api.tgi.responses import Details, Generated
from quire.server.api.timing_headers import timing_headers
from quire.server.api.validation import typed
from quire.server.http.body import Body, read_json
from quire.server.http.sse import EventStream, first_deltas
from quire.server.service.answers import Answer, collect
from quire.server.service.arrival import Arrival
from quire.server.service.guided import guided
from quire.server.service.job import GenerationSpec
from quire.server.service.ledger import ledger
from quire.server.service.service import Service
from quire.server.service.stream import Stream


async def generate(service: Service, request: Request) -> Response:
    return await _answer(service, request, await read_json(service, request), stream=False)


async def generate_stream(service: Service, request: Request) -> Response:
    return await _answer(service, request, await read_json(service, request), stream=True)


async def root(service: Service, request: Request) -> Response:
    """Streams or not as the body says; a whole answer is the only element of a list, with the prompt before it."""
    return await _answer_compatibly(service, request, await read_json(service, request))


async def invocations(service: Service, request: Request) -> Response:
    """Whatever the body is for."""
    body = await read_json(service, request)
    if "inputs" in body.raw:
        return await _answer_compatibly(service, request, body)
    if "messages" in body.raw:
        return await answer_chat(service, request, body)
    if "prompt" in body.raw:
        return await answer_completion(service, request, body)
    raise InvalidRequest("body has none of inputs, messages and prompt; it must have one")


async def _answer_compatibly(service: Service, request: Request, body: Body) -> Response:
    stream = body.raw.get("stream")
    return await _answer(service, request, body, stream=stream is True, full_text=True, in_list=True)


async def _answer(
    service: Service,
    request: Request,
    body: Body,
    *,
    stream: bool,
    full_text: bool = False,
    in_list: bool = False,
) -> Response:
    """`full_text`: the prompt stands before the answer unless the request says otherwise."""
    if stream and service.settings.tgi_strict:
        answering = _answer_typed(service, request, body, stream=True, full_text=full_text, in_list=in_list)
        return await quirks.as_event(service, answering, native=True)
    return await _answer_typed(service, request, body, stream=stream, full_text=full_text, in_list=in_list)


async def _answer_typed(
    service: Service, request: Request, given: Body, *, stream: bool, full_text: bool, in_list: bool
) -> Response:
    arrival = Arrival(request.headers, "generate_stream" if stream else "generate")
    parsed = await service.offload.run(
        given.num_bytes, lambda: parse_generate(service, arrival, given.raw, stream=stream)
    )
    body, parameters, asked, unknown, grammar = parsed
    asked = await guided(service, arrival, asked, "grammar", grammar)
    if body.stream is not None and body.stream != stream:
        unknown.append("stream")  # the route's name says it
    arrival.wants_timings |= bool(body.timings)
    opened = service.open([asked], arrival, field="best_of")
    wants_full = full_text if parameters.return_full_text is None else parameters.return_full_text
    prefix = body.inputs if wants_full else ""
    headers = ignored_header(unknown)
    if stream:
        encoder = GenerateEvents(opened, parameters.top_n_tokens or 0, prefix)
        return EventStream(opened, encoder, await first_deltas(opened, request.receive), headers)
    (answers,) = await collect(opened, request.receive)

    def write() -> bytes:
        reply = _reply(opened, parameters, answers, prefix)
        if arrival.wants_timings:
            reply["timings"] = ledger(opened)
        return msgspec.json.encode([reply] if in_list else reply)

    shown_tokens = opened.num_prompt_tokens + opened.num_tokens * (1 + (parameters.top_n_tokens or 0))
    content = await service.offload.run(len(prefix) + shown_tokens, write)
    headers |= timing_headers(opened, len(body.inputs))
    return Response(content, 200, headers, "application/json")


class ParsedGenerate(NamedTuple):
    body: GenerateRequest
    parameters: Parameters
    asked: GenerationSpec  # of the engine, but for a grammar
    unknown: list[str]  # names of fields that nothing knows
    grammar: Grammar | None


def parse_generate(service: Service, arrival: Arrival, raw: dict[str, Any], *, stream: bool) -> ParsedGenerate:
    """Everything about a body with `inputs` that takes longer the longer it is."""
    body, unknown = typed(raw, GenerateRequest, {}, strict=service.settings.strict)
    parameters, more_unknown, grammar = parse_parameters(service, body.parameters, stream=stream)
    sampled = is_sampled(None if body.parameters is None else parameters)
    asked = ask_to_continue(service, arrival, body.inputs, parameters, sampled=sampled, stream=stream)
    return ParsedGenerate(body, parameters, asked, [*unknown, *more_unknown], grammar)


def parse_parameters(
    service: Service, given: dict[str, Any] | None, *, stream: bool
) -> tuple[Parameters, list[str], Grammar | None]:
    """The parameters, the names of those that nothing knows, and the grammar among them."""
    settings = service.settings
    parameters, unknown = typed(
        given or {}, Parameters, PARAMETER_REFUSALS, strict=settings.strict, where="parameters."
    )
    check(parameters, settings, stream=stream)
    grammar = grammar_of("grammar", parameters.grammar, needs_properties=settings.tgi_strict)
    return parameters, unknown, grammar


def ask_to_continue(
    service: Service, arrival: Arrival, inputs: str, parameters: Parameters, *, sampled: bool, stream: bool = False
) -> GenerationSpec:
    """What the engine is asked about one text."""
    if not inputs:
        raise InvalidRequest.for_field("inputs", "is empty; it must have at least 1 character")
    with arrival.tokenising():
        (tokens,) = encode_texts(service.model, [inputs])
    return ask(
        service.model,
        service.settings,
        parameters,
        tokens,
        sampled=sampled,
        scored=stream or bool(parameters.details or parameters.decoder_input_details) or (parameters.best_of or 1) > 1,
    )


def _reply(stream: Stream, parameters: Parameters, answers: list[Answer], prefix: str) -> Generated:
    prompt = stream.prompts[0]
    tokenizer = stream.service.model.tokenizer
    best, *others = sorted(answers, key=lambda answer: -answer.mean_logprob)
    reply: Generated = {"generated_text": prefix + best.text}
    if not (parameters.details or parameters.decoder_input_details):
        return reply
    top_n_tokens = parameters.top_n_tokens or 0
    details: Details = {**sequence_details(tokenizer, prompt, best, top_n_tokens)}  # type: ignore[typeddict-item]
    reply["details"] = details
    if others:
        details["best_of_sequences"] = [
            {"generated_text": prefix + other.text, **sequence_details(tokenizer, prompt, other, top_n_tokens)}
            for other in others
        ]
    return reply
