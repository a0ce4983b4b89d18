"""The routes under /v2, as KServe's inference protocol has them: a text in, a text out, both as bytes."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.errors import InvalidRequest
from quire.server.answers import collect
from quire.server.arrival import Arrival
from quire.server.body import read_body
from quire.server.health import unhealthy
from quire.server.ledger import ledger
from quire.server.openai.reply import ignored_header
from quire.server.sampling import between
from quire.server.service import Service
from quire.server.tgi.generate import understand
from quire.server.validation import parse_json, typed


class InferInput(msgspec.Struct, kw_only=True):
    name: str
    shape: list[int]
    datatype: str
    data: list[int]  # bytes of UTF-8


class InferOutput(msgspec.Struct, kw_only=True):
    name: str


class InferRequest(msgspec.Struct, kw_only=True):
    id: str
    inputs: list[InferInput]
    outputs: list[InferOutput]
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
    raw = parse_json(await read_body(service, request))
    body, unknown = typed(raw, InferRequest, {}, strict=service.settings.strict)
    between("the number of inputs", len(body.inputs), 1, service.settings.max_client_batch_size)
    if len(body.inputs) != len(body.outputs):
        raise InvalidRequest(f"inputs has {len(body.inputs)} and outputs {len(body.outputs)}; they must be as many")
    asked = []
    for index, one in enumerate(body.inputs):
        generate: dict[str, Any] = {"inputs": _text(one, index)}
        if body.parameters is not None:
            generate["parameters"] = body.parameters
        understood = await understand(service, arrival, generate, stream=False)
        asked.append(understood.asked)
    unknown += understood.unknown  # the same for each
    stream = service.open(asked, arrival)
    answers = await collect(stream, request.receive)
    outputs = []
    for output, each in zip(body.outputs, answers, strict=True):
        data = max(each, key=lambda answer: answer.mean_logprob).text.encode()
        outputs.append({"name": output.name, "shape": [1, len(data)], "datatype": "BYTES", "data": list(data)})
    reply: dict[str, Any] = {"id": body.id, "outputs": outputs}
    if arrival.wants_timings:
        reply["timings"] = ledger(stream)
    return _json(reply, ignored_header(unknown))


def _text(given: InferInput, index: int) -> str:
    if given.datatype != "BYTES":
        raise InvalidRequest(f"inputs[{index}].datatype is {given.datatype[:40]!r}; it must be 'BYTES'")
    try:
        return bytes(given.data).decode()
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"inputs[{index}].data is no UTF-8: {error}") from None


def _model(service: Service, request: Request) -> tuple[str, str]:
    name, version = request.path_params["model"], request.path_params["version"]
    service.model.check_name(name)
    return name, version


def _json(body: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), 200, headers, "application/json")
