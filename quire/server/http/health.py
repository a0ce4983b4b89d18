"""Health and metrics routes."""

import time
from typing import TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.http.unhealthy import unhealthy_json
from quire.server.observe.endpoint_metrics import write_endpoint
from quire.server.observe.engine_metrics import write_engines
from quire.server.observe.exposition import CONTENT_TYPE, Exposition
from quire.server.service.service import Service


class EngineState(TypedDict):
    engine: int
    reason: str | None  # why it would not answer requests; None if it would


class EngineStates(TypedDict):
    """One or more of several engines would answer requests."""

    engines: list[EngineState]


class Generates(TypedDict):
    last_step_age_s: float | None
    took_s: float


async def live(service: Service, request: Request) -> Response:
    """Liveness: a restart of the server would not help."""
    if service.is_permanently_down and not service.is_draining:
        return unhealthy(service.why_not_ready or "the engine is gone")
    return Response()


async def ready(service: Service, request: Request) -> Response:
    """Readiness: requests would be answered."""
    reason = service.why_not_ready
    if reason is not None:
        return unhealthy(reason)
    if len(service.engines) == 1:
        return Response()
    now = time.monotonic()
    body: EngineStates = {"engines": [{"engine": one.number, "reason": one.problem(now)} for one in service.engines]}
    return Response(msgspec.json.encode(body), media_type="application/json")


async def generates(service: Service, request: Request) -> Response:
    """Tokens are generated: a busy engine shows it by its steps, an idle one by a token that it is asked for."""
    reason = service.why_not_ready
    if reason is not None:
        return unhealthy(reason)
    outcome = await service.probe.outcome()
    if outcome.problem is not None:
        return unhealthy(outcome.problem)
    body: Generates = {"last_step_age_s": service.last_step_age_s, "took_s": outcome.took_s}
    return Response(msgspec.json.encode(body), media_type="application/json")


async def metrics(service: Service, request: Request) -> Response:
    out = Exposition()
    service.publish_counts()  # what was shown once stays in the sum, whichever worker answers next
    service.metrics.write(out, service.others.by_worker.values())
    if service.stats is not None:
        reports = {engine.number: engine.stats for engine in service.engines if engine.stats is not None}
        write_engines(out, reports, is_labelled=len(service.engines) > 1)
        write_endpoint(out, service.stats, service.model.name)
    if len(service.engines) > 1:
        now = time.monotonic()
        up = [({"engine": str(one.number)}, int(one.problem(now) is None)) for one in service.engines]
        out.family("gauge", "quire_engine_up", "Engines that would answer requests.", up)
    return Response(out.text(), headers={"content-type": CONTENT_TYPE})


def unhealthy(reason: str) -> Response:
    return Response(unhealthy_json(reason), 503, media_type="application/json")
