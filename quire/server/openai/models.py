"""GET /v1/models."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.openai.errors import ModelNotFound
from quire.server.service import Service


async def list_models(service: Service, request: Request) -> Response:
    return _json({"object": "list", "data": [_card(service)]})


async def get_model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    if name != service.model.name:  # none of the names that stand for any model
        raise ModelNotFound(f"model {name[:80]!r} does not exist; this server has {service.model.name!r}")
    return _json(_card(service))


def _card(service: Service) -> dict[str, Any]:
    model = service.model
    card = {"id": model.name, "object": "model", "created": model.created, "owned_by": model.name}
    if service.settings.tgi_strict:
        return card | {"created": 0}
    return card | {"max_model_len": model.max_total_tokens}


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
