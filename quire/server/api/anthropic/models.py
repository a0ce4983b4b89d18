"""GET /v1/models for clients of the Anthropic API."""

from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.anthropic.dialect import ANTHROPIC
from quire.server.api.anthropic.errors import own_headers
from quire.server.api.anthropic.responses import AnthropicModel, AnthropicModelList
from quire.server.service.service import Service


async def list_models(service: Service, request: Request) -> Response:
    names = [service.model.name, *sorted(service.model.adapters)]
    cards = [_card(service, name) for name in names]
    return _json({"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]})


async def get_model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    if name != service.model.name and name not in service.model.adapters:  # exact name
        return ANTHROPIC.error_response(service.model.not_found(name))  # the route itself is OpenAI's
    return _json(_card(service, name))


def _card(service: Service, name: str) -> AnthropicModel:
    model = service.model
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.max_input_tokens,
        "max_tokens": model.max_total_tokens,
    }


def _json(body: AnthropicModelList | AnthropicModel) -> Response:
    return Response(msgspec.json.encode(body), 200, own_headers(), "application/json")
