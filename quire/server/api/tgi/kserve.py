"""The routes under /v2, as KServe's inference protocol has them: a text in, a text out, both as bytes."""

from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.errors import InvalidRequest
from quire.request import Grammar
from quire.server.api.openai.reply import ignored_header
from quire.server.api.sampling import between
from quire.server.api.tgi.asking import is_sampled, refuse_details
from quire.server.api.tgi.generate import ask_to_continue, parse_parameters
from quire.server.api.tgi.responses import Inferred, InferredOutput, KServeLive, KServeServer
from quire.server.api.validation import typed
from quire.server.http.body import Body, read_json
from quire.server.http.health import unhealthy
from quire.server.service.answers import collect
from quire.server.service.arrival import Arrival
from quire.server.service.guided import guided
from quire.server.service.job import GenerationSpec
from quire.server.service.ledger import ledger
from quire.server.service.service import Service


class InferInput(msgspec.Struct, kw_only=True):
    name: str
    shape: list[int]
    datatype: str
    data: list[int]  # bytes of UTF-8


class InferOutput(msgspec.Struct, kw_only=True):
    name: str


class InferRequest(msgspec.Struct, kw_only=True):
    id: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    parameters: dict[str, Any] | None = None  # as those of /generate


async def server_metadata(service: Service, request: Request) -> Response:
    return _json({"name": "quire", "version": __version__, "extensions": ["health", "models", "metrics"]})


async def live(service: Service, request: Request) -> Response:
    if service.is_beyond_help and not service.is_draining:
        return unhealthy(service.why_not_ready or "the engine is gone")
    return _json({"live": True})


async def ready(service: Service, request: Request) -> Response:
    reason = service.why_not_ready
    return _json({"live": True}) if reason is None else unhealthy(reason)


async def model_metadata(service: Service, request: Request) -> Response:
    name, version = _model(service, request)
    return _json({"name": name, "version": version, "extensions": ["infer", "ready"]})


async def model_ready(service: Service, request: Request) -> Response:
    _model(service, request)
    return await ready(service, request)


async def infer(service: Service, request: Request) -> Response:
    """One answer for each input, under the name that the output of the same place has."""
    _model(service, request)
    arrival = Arrival(request.headers, "infer")
    body = await read_json(service, request)
    parsed = await service.offload.run(body.num_bytes, lambda: _parse(service, arrival, body))
    asked = [await guided(service, arrival, one, "grammar", parsed.grammar) for one in parsed.asked]
    stream = service.open(asked, arrival, field="inputs")
    answers = await collect(stream, request.receive)

    def write() -> bytes:
        outputs: list[InferredOutput] = []
        for name, prefix, each in zip(parsed.names, parsed.prefixes, answers, strict=True):
            data = (prefix + max(each, key=lambda answer: answer.mean_logprob).text).encode()
            outputs.append({"name": name, "shape": [1, len(data)], "datatype": "BYTES", "data": list(data)})
        reply: Inferred = {"id": parsed.id, "outputs": outputs}
        if arrival.wants_timings:
            reply["timings"] = ledger(stream)
        return msgspec.json.encode(reply)

    content = await service.offload.run(stream.num_tokens + sum(map(len, parsed.prefixes)), write)
    return Response(content, 200, ignored_header(parsed.unknown), "application/json")


class ParsedInfer(NamedTuple):
    id: str
    names: list[str]  # of the outputs
    prefixes: list[str]  # before each answer
    asked: list[GenerationSpec]  # of the engine, but for a grammar
    unknown: list[str]  # names of fields that nothing knows
    grammar: Grammar | None


def _parse(service: Service, arrival: Arrival, given: Body) -> ParsedInfer:
    strict = service.settings.strict
    body, unknown = typed(given.raw, InferRequest, {}, strict=strict)
    between("the number of inputs", len(body.inputs), 1, service.settings.max_client_batch_size, param="inputs")
    if len(body.inputs) != len(body.outputs):
        raise InvalidRequest.for_field(
            "inputs", f"has {len(body.inputs)} and outputs {len(body.outputs)}; they must be as many"
        )
    texts: list[str] = []
    names: list[str] = []
    for index, (an_input, an_output) in enumerate(zip(body.inputs, body.outputs, strict=True)):
        one, more_unknown = typed(an_input, InferInput, {}, strict=strict, where=f"inputs[{index}].")
        output, yet_more = typed(an_output, InferOutput, {}, strict=strict, where=f"outputs[{index}].")
        texts.append(_text(one, index))
        names.append(output.name)
        unknown += more_unknown + yet_more
    parameters, more_unknown, grammar = parse_parameters(service, body.parameters, stream=False)
    refuse_details(parameters, service.settings)
    sampled = is_sampled(None if body.parameters is None else parameters)
    asked = [ask_to_continue(service, arrival, text, parameters, sampled=sampled) for text in texts]
    prefixes = texts if parameters.return_full_text else [""] * len(texts)
    return ParsedInfer(body.id, names, prefixes, asked, unknown + more_unknown, grammar)


def _text(given: InferInput, index: int) -> str:
    if given.datatype != "BYTES":
        raise InvalidRequest.for_field(f"inputs[{index}].datatype", f"is {given.datatype[:40]!r}; it must be 'BYTES'")
    try:
        return bytes(given.data).decode()
    except (ValueError, OverflowError) as error:
        raise InvalidRequest.for_field(f"inputs[{index}].data", f"is no UTF-8: {error}") from None


def _model(service: Service, request: Request) -> tuple[str, str]:
    name, version = request.path_params["model"], request.path_params["version"]
    service.model.check_name(name)
    return name, version


def _json(body: KServeServer | KServeLive) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
