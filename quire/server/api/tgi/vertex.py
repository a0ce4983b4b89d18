"""POST /vertex: several requests at once, answered by their texts."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequest, invalid, shown
from quire.server.api.chat import PreparedChat
from quire.server.api.job import Job, answer
from quire.server.api.openai.chat import parse_chat
from quire.server.api.sampling import between
from quire.server.api.tgi.dialect import TGIDialect
from quire.server.api.tgi.generate import ParsedGenerate, parse_generate
from quire.server.api.tgi.responses import Predictions
from quire.server.api.tgi.texts import texts_body
from quire.server.api.validation import typed
from quire.server.http.body import read_json
from quire.server.service.arrival import Arrival
from quire.server.service.service import Service


class VertexRequest(msgspec.Struct, kw_only=True):
    instances: list[dict[str, Any]]  # each a body for /generate or for a chat completion


async def vertex(service: Service, request: Request) -> Response:
    body = await read_json(service, request)
    return await answer(service, request, body, _parse, request.scope["route"].dialect, name="vertex")


def _parse(service: Service, dialect: TGIDialect, arrival: Arrival, raw: dict[str, Any]) -> Job:
    body, unknown = typed(raw, VertexRequest, {}, strict=service.settings.strict)
    most = service.settings.max_client_batch_size
    between("the number of instances", len(body.instances), 1, most, param="instances")
    parsed: list[ParsedGenerate | PreparedChat] = []
    for index, instance in enumerate(body.instances):
        where = f"instances[{index}]"
        try:
            parsed.append(_parse_instance(service, dialect, arrival, instance))
        except InvalidRequest as error:
            inner = where if error.param is None else f"{where}.{error.param}"
            raise type(error)(f"{where}: {error.message}", param=inner) from None
        unknown += [f"{where}.{name}" for name in parsed[-1].unknown]
    prefixes = [_prefix(one) for one in parsed]
    return Job(
        specs=[one.spec for one in parsed],
        body=texts_body(prefixes, _predictions),
        num_characters=sum(map(len, prefixes)),
        unknown=unknown,
        user=_users(parsed),
        wants_timings=any(one.fields.timings for one in parsed),
        sequences_field="instances",
        has_timing_headers=False,
    )


def _predictions(texts: list[str]) -> Predictions:
    return {"predictions": texts}


def _parse_instance(
    service: Service, dialect: TGIDialect, arrival: Arrival, instance: dict[str, Any]
) -> ParsedGenerate | PreparedChat:
    if instance.get("stream"):
        raise invalid("stream", f"is {shown(instance['stream'])}; predictions are not streamed")
    if "inputs" in instance:
        parameters = dialect.vertex_parameters(instance.get("parameters"))
        return parse_generate(service, dialect, arrival, instance | {"parameters": parameters}, texts_only=True)
    if "messages" not in instance:
        raise invalid("inputs", "and messages are missing; an instance has one of them")
    chat = parse_chat(service, dialect.openai, arrival, instance)
    between("n", 1 if chat.fields.n is None else chat.fields.n, 1, 1)
    if not dialect.drops_details:
        for name in ("logprobs", "return_token_ids"):
            if getattr(chat.fields, name):
                raise invalid(name, "is true; predictions are plain text")
    return chat


def _prefix(parsed: ParsedGenerate | PreparedChat) -> str:
    """The text before the answer."""
    return parsed.fields.inputs if isinstance(parsed, ParsedGenerate) and parsed.parameters.return_full_text else ""


def _users(parsed: list[ParsedGenerate | PreparedChat]) -> str | None:
    """All users that the instances name, for the log."""
    users = {one.fields.user for one in parsed if isinstance(one, PreparedChat) and one.fields.user is not None}
    return ",".join(sorted(users)) if users else None
