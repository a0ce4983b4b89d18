"""GET /v1/models."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.openai.errors import ModelNotFound
from quire.server.served_model import ServedModel
from quire.server.service import Service


async def list_models(service: Service, request: Request) -> Response:
    return _json({"object": "list", "data": [_card(service.model)]})


async def get_model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    if name != service.model.name:
        raise ModelNotFound(f"model {name[:80]!r} does not exist; this server has {service.model.name!r}")
    return _json(_card(service.model))


def _card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": model.name,
        "max_model_len": model.max_total_tokens,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
