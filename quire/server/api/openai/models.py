"""GET /v1/models."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.openai.responses import ModelCard, ModelList
from quire.server.service.service import Service


async def list_models(service: Service, request: Request) -> Response:
    return _json({"object": "list", "data": [_card(service, request)]})


async def get_model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    if name != service.model.name:  # none of the names that stand for any model
        raise service.model.not_found(name)
    return _json(_card(service, request))


def _card(service: Service, request: Request) -> ModelCard:
    model, dialect = service.model, request.scope["route"].dialect
    card: ModelCard = {"id": model.name, "object": "model", "created": 0, "owned_by": model.name}
    if dialect.has_details:
        card |= {"created": model.created, "max_model_len": model.max_total_tokens}
    return card


def _json(body: ModelList | ModelCard) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
