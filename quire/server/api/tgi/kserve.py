"""The routes under /v2, as KServe's inference protocol has them: a text in, a text out, both as bytes."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.errors import invalid
from quire.server.api.job import Job, answer
from quire.server.api.sampling import between
from quire.server.api.tgi.dialect import TGIDialect
from quire.server.api.tgi.parameters import generation_spec, parse_parameters
from quire.server.api.tgi.responses import Inferred, InferredOutput, KServeLive, KServeServer
from quire.server.api.tgi.texts import texts_body
from quire.server.api.validation import typed
from quire.server.http.body import read_json
from quire.server.http.health import unhealthy
from quire.server.service.arrival import Arrival
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
    if service.is_permanently_down and not service.is_draining:
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
    """One answer for each input, named like the output at the same index."""
    name, _ = _model(service, request)
    body = await read_json(service, request)
    adapter, parameters = service.model.adapter_of(name), body.raw.get("parameters")
    if adapter is not None and isinstance(parameters, dict | None):
        body.raw["parameters"] = {"adapter_id": adapter, **(parameters or {})}
    return await answer(service, request, body, _parse, request.scope["route"].dialect, name="infer")


def _parse(service: Service, dialect: TGIDialect, arrival: Arrival, raw: dict[str, Any]) -> Job:
    settings = service.settings
    body, unknown = typed(raw, InferRequest, {}, strict=settings.strict)
    between("the number of inputs", len(body.inputs), 1, settings.max_client_batch_size, param="inputs")
    if len(body.inputs) != len(body.outputs):
        raise invalid("inputs", f"has {len(body.inputs)} and outputs {len(body.outputs)}; they must be as many")
    texts: list[str] = []
    names: list[str] = []
    for index, (given, wanted) in enumerate(zip(body.inputs, body.outputs, strict=True)):
        an_input, more = typed(given, InferInput, {}, strict=settings.strict, where=f"inputs[{index}].")
        output, yet_more = typed(wanted, InferOutput, {}, strict=settings.strict, where=f"outputs[{index}].")
        texts.append(_text(an_input, index))
        names.append(output.name)
        unknown += more + yet_more
    parsed = parse_parameters(settings, dialect, body.parameters, texts_only=True)
    prefixes = texts if parsed.parameters.return_full_text else [""] * len(texts)

    def write(answers: list[str]) -> Inferred:
        return {"id": body.id, "outputs": [_output(*pair) for pair in zip(names, answers, strict=True)]}

    return Job(
        specs=[generation_spec(service, dialect, arrival, text, parsed) for text in texts],
        body=texts_body(prefixes, write),
        num_characters=sum(map(len, prefixes)),
        unknown=unknown + parsed.unknown,
        sequences_field="inputs",
        has_timing_headers=False,
    )


def _output(name: str, text: str) -> InferredOutput:
    data = text.encode()
    return {"name": name, "shape": [1, len(data)], "datatype": "BYTES", "data": list(data)}


def _text(given: InferInput, index: int) -> str:
    if given.datatype != "BYTES":
        raise invalid(f"inputs[{index}].datatype", f"is {given.datatype[:40]!r}; it must be 'BYTES'")
    try:
        return bytes(given.data).decode()
    except (ValueError, OverflowError) as error:
        raise invalid(f"inputs[{index}].data", f"is no UTF-8: {error}") from None


def _model(service: Service, request: Request) -> tuple[str, str]:
    name, version = request.path_params["model"], request.path_params["version"]
    service.model.check_name(name)
    return name, version


def _json(body: KServeServer | KServeLive) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
