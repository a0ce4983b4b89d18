"""Whether it works, and how it is doing."""

import asyncio
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import QuireError
from quire.request import Request as EngineRequest
from quire.request import SamplingParams
from quire.server.engine_metrics import write_engine
from quire.server.exposition import CONTENT_TYPE, Exposition
from quire.server.service import Service
from quire.server.stream import Asked

MAX_GENERATION_S = 10.0


async def live(service: Service, request: Request) -> Response:
    """Starting it anew would not help."""
    if service.is_beyond_help and not service.is_draining:
        return unhealthy(service.why_not_ready or "the engine is gone")
    return Response()


async def ready(service: Service, request: Request) -> Response:
    """Requests would be answered."""
    reason = service.why_not_ready
    return Response() if reason is None else unhealthy(reason)


async def generates(service: Service, request: Request) -> Response:
    """Tokens come out: by the age of the last step while there is work, by generating one while there is none."""
    reason = service.why_not_ready
    if reason is not None:
        return unhealthy(reason)
    begun_s = time.monotonic()
    if not service.num_streams:
        try:
            await asyncio.wait_for(_generate_one(service), MAX_GENERATION_S)
        except TimeoutError:
            return unhealthy(f"no token came within {MAX_GENERATION_S:g} s")
        except QuireError as error:
            return unhealthy(error.message)
    stats = service.stats
    body = {"last_step_age_s": None if stats is None else stats.idle_s, "took_s": time.monotonic() - begun_s}
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _generate_one(service: Service) -> None:
    probe = EngineRequest(0, (0,), 1, SamplingParams(temperature=0.0), salt="health")
    stream = service.open([Asked(probe)], is_counted=False)
    try:
        while await stream.read():
            pass
    finally:
        stream.close()


def unhealthy(reason: str, headers: dict[str, str] | None = None) -> Response:
    body = {"error": "unhealthy", "error_type": "healthcheck", "reason": reason}
    return Response(msgspec.json.encode(body), 503, headers, "application/json")


async def metrics(service: Service, request: Request) -> Response:
    page = Exposition()
    service.metrics.write(page, service.others)
    if service.stats is not None:
        write_engine(page, service.stats)
    return Response(page.text(), headers={"content-type": CONTENT_TYPE})
