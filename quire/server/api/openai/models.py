"""GET /v1/models."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.openai.responses import ModelCard, ModelList
from quire.server.service.service import Service


async def list_models(service: Service, request: Request) -> Response:
    names = [service.model.name, *sorted(service.model.adapters)]
    return _json({"object": "list", "data": [_card(service, request, name) for name in names]})


async def get_model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    model = service.model
    if name != model.name and name not in model.adapters:  # exact name
        raise model.not_found(name)
    return _json(_card(service, request, name))


def _card(service: Service, request: Request, name: str) -> ModelCard:
    """The card of the model or of an adapter. The parent of an adapter is the model. Clients do not see its folder."""
    model, dialect = service.model, request.scope["route"].dialect
    card: ModelCard = {"id": name, "object": "model", "created": 0, "owned_by": model.name}
    if dialect.has_details:
        card |= {"created": model.created, "max_model_len": model.max_total_tokens}
    if name != model.name:
        card["parent"] = model.name
    return card


def _json(body: ModelList | ModelCard) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
