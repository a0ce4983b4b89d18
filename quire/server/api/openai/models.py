"""GET /v1/models."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import ModelNotFound, shown
from quire.server.api.openai.responses import ModelCard, ModelList
from quire.server.service.service import Service


async def list_models(service: Service, request: Request) -> Response:
    return _json({"object": "list", "data": [_card(service)]})


async def get_model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    if name != service.model.name:  # none of the names that stand for any model
        raise ModelNotFound.for_field("model", f"{shown(name)} does not exist; this server has {service.model.name!r}")
    return _json(_card(service))


def _card(service: Service) -> ModelCard:
    model = service.model
    if service.settings.tgi_strict:
        return {"id": model.name, "object": "model", "created": 0, "owned_by": model.name}
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": model.name,
        "max_model_len": model.max_total_tokens,
    }


def _json(body: ModelList | ModelCard) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
