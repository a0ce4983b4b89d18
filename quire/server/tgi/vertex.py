"""POST /vertex: several requests at once, answered by their texts."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest
from quire.server.answers import collect
from quire.server.arrival import Arrival
from quire.server.body import read_body
from quire.server.ledger import ledger
from quire.server.openai.chat import ask_chat
from quire.server.openai.reply import ignored_header
from quire.server.openai.requests import CHAT_REFUSALS, ChatRequest
from quire.server.openai.tool_use import tool_use
from quire.server.sampling import between
from quire.server.service import Service
from quire.server.stream import Asked
from quire.server.tgi import quirks
from quire.server.tgi.generate import understand
from quire.server.validation import parse_json, shown, typed


class VertexRequest(msgspec.Struct, kw_only=True):
    instances: list[dict[str, Any]]  # each a body for /generate or for a chat completion


async def vertex(service: Service, request: Request) -> Response:
    arrival = Arrival(request.headers, "vertex")
    raw = parse_json(await read_body(service, request))
    body, unknown = typed(raw, VertexRequest, {}, strict=service.settings.strict)
    between("the number of instances", len(body.instances), 1, service.settings.max_client_batch_size)
    asked: list[Asked] = []
    prefixes: list[str] = []
    for index, instance in enumerate(body.instances):
        one, prefix, more_unknown = await _understand(service, arrival, instance, f"instances[{index}]")
        asked.append(one)
        prefixes.append(prefix)
        unknown += more_unknown
    stream = service.open(asked, arrival)
    answers = await collect(stream, request.receive)
    best = [max(each, key=lambda answer: answer.mean_logprob) for each in answers]
    reply: dict[str, Any] = {
        "predictions": [prefix + answer.text for prefix, answer in zip(prefixes, best, strict=True)]
    }
    if arrival.wants_timings:
        reply["timings"] = ledger(stream)
    return Response(msgspec.json.encode(reply), 200, ignored_header(unknown), "application/json")


async def _understand(
    service: Service, arrival: Arrival, instance: dict[str, Any], where: str
) -> tuple[Asked, str, list[str]]:
    """What the engine is asked, what stands before the answer, and fields that nothing knows."""
    if instance.get("stream"):
        raise InvalidRequest(f"{where}.stream is {shown(instance['stream'])}; predictions are not streamed")
    strict = service.settings.tgi_strict
    if "inputs" in instance:
        if strict:
            instance = instance | {"parameters": quirks.vertex_parameters(instance.get("parameters"))}
        body, parameters, asked, unknown = await understand(service, arrival, instance, stream=False)
        return asked, body.inputs if parameters.return_full_text else "", unknown
    if "messages" not in instance:
        raise InvalidRequest(f"{where} has neither inputs nor messages; it must have one")
    fields, unknown = typed(instance, ChatRequest, CHAT_REFUSALS, strict=service.settings.strict)
    if strict:
        fields, unread = quirks.as_read(fields)
        unknown += unread
    between(f"{where}.n", 1 if fields.n is None else fields.n, 1, 1)
    asked, _ = await ask_chat(service, arrival, fields, tool_use(fields, service.model))
    return asked, "", unknown
