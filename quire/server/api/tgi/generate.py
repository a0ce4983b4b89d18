"""POST /, /generate, /generate_stream and /invocations."""

from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest
from quire.server.api.job import Job, answer
from quire.server.api.openai.chat import answer_chat
from quire.server.api.openai.completions import answer_completion
from quire.server.api.tgi.dialect import TGIDialect
from quire.server.api.tgi.generate_encoder import GenerateEncoder
from quire.server.api.tgi.parameters import generation_spec, parse_parameters
from quire.server.api.tgi.requests import GenerateRequest, Parameters
from quire.server.api.validation import typed
from quire.server.http.body import Body, read_json
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.service import Service


async def generate(service: Service, request: Request) -> Response:
    return await _answer(service, request, await read_json(service, request), streams=False)


async def generate_stream(service: Service, request: Request) -> Response:
    return await _answer(service, request, await read_json(service, request), streams=True)


async def root(service: Service, request: Request) -> Response:
    """Streams or not as the body says. A whole answer is the only element of a list, after its prompt."""
    return await _answer_compatibly(service, request, await read_json(service, request))


async def invocations(service: Service, request: Request) -> Response:
    """A body for any of the routes that generate."""
    body = await read_json(service, request)
    dialect: TGIDialect = request.scope["route"].dialect
    if "inputs" in body.raw:
        return await _answer_compatibly(service, request, body)
    if "messages" in body.raw:
        return await answer_chat(service, request, body, dialect.openai)
    if "prompt" in body.raw:
        return await answer_completion(service, request, body, dialect.openai)
    raise InvalidRequest("body has none of inputs, messages and prompt; it must have one")


async def _answer_compatibly(service: Service, request: Request, body: Body) -> Response:
    streams = body.raw.get("stream") is True
    return await _answer(service, request, body, streams=streams, full_text=True, in_list=True)


async def _answer(
    service: Service, request: Request, body: Body, *, streams: bool, full_text: bool = False, in_list: bool = False
) -> Response:
    """`full_text`: the prompt stands before the answer unless the request says otherwise."""

    def parse(service: Service, dialect: TGIDialect, arrival: Arrival, raw: dict[str, Any]) -> Job:
        fields, parameters, spec, unknown = parse_generate(service, dialect, arrival, raw, streams=streams)
        if fields.stream is not None and fields.stream != streams:
            unknown.append("stream")  # the route decides
        has_prompt = full_text if parameters.return_full_text is None else parameters.return_full_text
        prefix = fields.inputs if has_prompt else ""
        encoder = GenerateEncoder(parameters, prefix, in_list=in_list)
        return Job(
            specs=[spec],
            body=encoder.body,
            events=encoder.events,
            num_characters=len(fields.inputs),
            num_top=parameters.top_n_tokens or 0,
            unknown=unknown,
            wants_timings=bool(fields.timings),
            sequences_field="best_of",
        )

    name = "generate_stream" if streams else "generate"
    return await answer(service, request, body, parse, request.scope["route"].dialect, name=name, streams=streams)


class ParsedGenerate(NamedTuple):
    fields: GenerateRequest
    parameters: Parameters
    spec: GenerationSpec
    unknown: list[str]  # fields that the API does not know


def parse_generate(
    service: Service,
    dialect: TGIDialect,
    arrival: Arrival,
    raw: dict[str, Any],
    *,
    streams: bool = False,
    texts_only: bool = False,
) -> ParsedGenerate:
    settings = service.settings
    fields, unknown = typed(raw, GenerateRequest, {}, strict=settings.strict)
    parsed = parse_parameters(settings, dialect, fields.parameters, streams, texts_only)
    spec = generation_spec(service, dialect, arrival, fields.inputs, parsed)
    return ParsedGenerate(fields, parsed.parameters, spec, [*unknown, *parsed.unknown])
