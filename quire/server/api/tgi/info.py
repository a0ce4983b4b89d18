"""GET /info."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.server.api.tgi.responses import Info
from quire.server.service.service import Service


async def info(service: Service, request: Request) -> Response:
    settings, model = service.settings, service.model
    body: Info = {
        "model_id": model.name,
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": settings.max_concurrent_requests,
        "max_best_of": settings.max_best_of,
        "max_stop_sequences": settings.max_stop_sequences,
        "max_input_tokens": model.max_input_tokens,
        "max_total_tokens": model.max_total_tokens,
        "validation_workers": settings.http_workers,
        "max_client_batch_size": settings.max_client_batch_size,
        "router": "quire",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
    return Response(msgspec.json.encode(body), media_type="application/json")
