"""POST /vertex: several requests at once, answered by their texts."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest, shown
from quire.server.api.openai.chat import ParsedChat, guided_chat, parse_chat
from quire.server.api.openai.reply import ignored_header
from quire.server.api.sampling import between
from quire.server.api.tgi import quirks
from quire.server.api.tgi.asking import refuse_details
from quire.server.api.tgi.generate import ParsedGenerate, parse_generate
from quire.server.api.tgi.responses import Predictions
from quire.server.api.validation import typed
from quire.server.http.body import Body, read_json
from quire.server.service.answers import collect
from quire.server.service.arrival import Arrival
from quire.server.service.guided import guided
from quire.server.service.job import GenerationSpec
from quire.server.service.ledger import ledger
from quire.server.service.service import Service


class VertexRequest(msgspec.Struct, kw_only=True):
    instances: list[dict[str, Any]]  # each a body for /generate or for a chat completion


async def vertex(service: Service, request: Request) -> Response:
    arrival = Arrival(request.headers, "vertex")
    body = await read_json(service, request)
    parsed, unknown = await service.offload.run(body.num_bytes, lambda: _parse(service, arrival, body))
    asked: list[GenerationSpec] = []
    for one in parsed:
        if isinstance(one, ParsedChat):
            asked.append(await guided_chat(service, arrival, one))
        else:
            asked.append(await guided(service, arrival, one.asked, "grammar", one.grammar))
    prefixes = [_prefix(one) for one in parsed]
    stream = service.open(asked, arrival, user=_users(parsed), field="instances")
    answers = await collect(stream, request.receive)

    def write() -> bytes:
        best = [max(each, key=lambda answer: answer.mean_logprob) for each in answers]
        texts = [prefix + answer.text for prefix, answer in zip(prefixes, best, strict=True)]
        reply: Predictions = {"predictions": texts}
        if arrival.wants_timings:
            reply["timings"] = ledger(stream)
        return msgspec.json.encode(reply)

    content = await service.offload.run(stream.num_tokens + sum(map(len, prefixes)), write)
    return Response(content, 200, ignored_header(unknown), "application/json")


def _parse(service: Service, arrival: Arrival, given: Body) -> tuple[list[ParsedGenerate | ParsedChat], list[str]]:
    """The instances, and the names of fields that nothing knows."""
    body, unknown = typed(given.raw, VertexRequest, {}, strict=service.settings.strict)
    between(
        "the number of instances", len(body.instances), 1, service.settings.max_client_batch_size, param="instances"
    )
    parsed: list[ParsedGenerate | ParsedChat] = []
    for index, instance in enumerate(body.instances):
        try:
            one = _parse_instance(service, arrival, instance)
        except InvalidRequest as error:
            where = f"instances[{index}]"
            inner = where if error.param is None else f"{where}.{error.param}"
            raise type(error)(f"{where}: {error.message}", param=inner) from None
        parsed.append(one)
        unknown += [f"instances[{index}].{name}" for name in one.unknown]
        arrival.wants_timings |= bool(one.body.timings if isinstance(one, ParsedGenerate) else one.fields.timings)
    return parsed, unknown


def _parse_instance(service: Service, arrival: Arrival, instance: dict[str, Any]) -> ParsedGenerate | ParsedChat:
    if instance.get("stream"):
        raise InvalidRequest.for_field("stream", f"is {shown(instance['stream'])}; predictions are not streamed")
    strict = service.settings.tgi_strict
    if "inputs" in instance:
        if strict:
            instance = instance | {"parameters": quirks.vertex_parameters(instance.get("parameters"))}
        generated = parse_generate(service, arrival, instance, stream=False)
        refuse_details(generated.parameters, service.settings)
        return generated
    if "messages" not in instance:
        raise InvalidRequest.for_field("inputs", "and messages are missing; an instance has one of them")
    chat = parse_chat(service, arrival, instance)
    between("n", 1 if chat.fields.n is None else chat.fields.n, 1, 1)
    if not strict:  # else they are left out
        for name in ("logprobs", "return_token_ids"):
            if getattr(chat.fields, name):
                raise InvalidRequest.for_field(name, "is true; predictions are texts alone")
    return chat


def _prefix(parsed: ParsedGenerate | ParsedChat) -> str:
    """What stands before the answer."""
    return parsed.body.inputs if isinstance(parsed, ParsedGenerate) and parsed.parameters.return_full_text else ""


def _users(parsed: list[ParsedGenerate | ParsedChat]) -> str | None:
    """Every user that an instance names, for the log."""
    users = {one.fields.user for one in parsed if isinstance(one, ParsedChat) and one.fields.user is not None}
    return ",".join(sorted(users)) if users else None
