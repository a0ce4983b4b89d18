"""Quire on Ray Serve: `serve run quire.ray:app`, or an application with settings by `build_app`.

A replica is a server. Its ingress is Quire's own application, which runs in the replica's process with the front end;
its engines are child processes, and the other members of a group are actors in the replica's placement group. So what
passes through Ray are the bytes of answers, through its HTTP proxy; no token passes through a handle.
"""

import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import EngineFailed, InvalidSetting, QuireError
from quire.ipc.address import new_address
from quire.ipc.supervisor_link import StartRefused, bind_to_parent
from quire.server.http.app import make_app
from quire.server.observe.logs import configure_logs
from quire.server.processes.engine_processes import EngineProcesses, engine_places
from quire.server.processes.front_end import FrontEnd
from quire.server.processes.model_engine import ModelEngine
from quire.server.processes.serve import model_engines
from quire.server.processes.supervisor import REASONS
from quire.server.rate_limits import RateLimits
from quire.server.service.service import Service
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.group import GroupSettings
from quire.settings.refusals import Case, refuse, settings_of

log = logging.getLogger(__name__)

EXPIRE_INTERVAL_S = 1.0
END_S = 20.0  # for the processes of a replica to end, after its requests
# Ray's proxy listens; its own options are in the configuration of Serve (http_options).
OF_THE_PROXY = (
    "host", "port", "http_workers", "prometheus_port", "keep_alive_s", "ssl_certfile", "ssl_keyfile",
    "ssl_keyfile_password", "ssl_handshake_s",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RaySettings:
    """Settings of the deployment. `group_size` members of a replica have these resources each."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 32.0  # of a replica, waiting ones included: more replicas are started beyond
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 600.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    group_size: int = 1
    deployment_name: str = "quire"

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise InvalidSetting(
                f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; they must be at least 0 "
                "and 1, and min_replicas at most max_replicas"
            )
        if self.group_size < 1:
            raise InvalidSetting(f"group_size is {self.group_size}; it must be at least 1")


def build_app(given: dict[str, Any]) -> Any:
    """The application of Serve. `given` has settings of `quire serve` and of RaySettings by their names.

    Texts are read as the settings' types, so that `serve run quire.ray:build_app model=default max_replicas=2` works.
    """
    config, settings, deployment = read_settings(given)
    resources = {"num_cpus": deployment.num_cpus, "num_gpus": deployment.num_gpus}
    options: dict[str, Any] = {
        "name": deployment.deployment_name,
        "ray_actor_options": resources,
        # Quire refuses by itself, with Retry-After; Ray's own queue would let clients wait without a word.
        "max_ongoing_requests": settings.max_concurrent_requests,
        "autoscaling_config": {
            "min_replicas": deployment.min_replicas,
            "max_replicas": deployment.max_replicas,
            "target_ongoing_requests": deployment.target_ongoing_requests,
            "upscale_delay_s": deployment.upscale_delay_s,
            "downscale_delay_s": deployment.downscale_delay_s,
        },
        "graceful_shutdown_timeout_s": settings.drain_s + END_S,
        "health_check_period_s": 2.0,
    }
    if deployment.group_size > 1:
        bundle = {"CPU": deployment.num_cpus} | ({"GPU": deployment.num_gpus} if deployment.num_gpus else {})
        options["placement_group_bundles"] = [bundle] * deployment.group_size
        options["placement_group_strategy"] = "PACK"
    replica = serve.deployment(serve.ingress()(Replica)).options(**options)
    return replica.bind(config, settings, deployment)


def read_settings(given: dict[str, Any]) -> tuple[Config, ServerSettings, RaySettings]:
    kinds = (Config, ServerSettings, RaySettings)
    known = {field.name: kind for kind in kinds for field in dataclasses.fields(kind)}
    for name in given:
        if name in OF_THE_PROXY:
            raise InvalidSetting(f"{name} is a setting of Ray's proxy here; see http_options of Serve")
        if name not in known:
            raise InvalidSetting(f"there is no setting {name!r}")
    read = []
    for kind in kinds:
        own = {name: value for name, value in given.items() if known[name] is kind}
        try:
            read.append(msgspec.convert(own, kind, strict=False, dec_hook=_path))
        except msgspec.ValidationError as error:
            raise InvalidSetting(str(error)) from None
    config, settings, deployment = read
    assert isinstance(config, Config)
    assert isinstance(settings, ServerSettings)
    assert isinstance(deployment, RaySettings)
    refuse(Case(settings_of(config, settings, deployment)))
    return config, settings, deployment


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{value!r} is no {kind.__name__}")


class Replica:
    """A server without a port. Owned by the event loop that Ray gives to a replica's code."""

    def __init__(self, config: Config, settings: ServerSettings, deployment: RaySettings) -> None:
        configure_logs(settings.log_format, settings.logging_level)
        self._stack = contextlib.ExitStack()
        group = new_group(deployment.group_size) if deployment.group_size > 1 else None
        self._members = [] if group is None else start_members(config, settings, deployment, group)
        first = ModelEngine(config, settings.log_format, False, settings.logging_level, group)
        builds = model_engines(first, settings.data_parallel)
        addresses = [self._stack.enter_context(new_address()) for _ in builds]
        self._front_end = FrontEnd(settings, 1, config.chat_template, RateLimits(settings.keys))
        self._engines = EngineProcesses(
            engine_places(builds, addresses), settings, self._refuse, self._front_end.give_up
        )
        self._refused = asyncio.Event()
        self._reason: QuireError = EngineFailed("the engine is starting")
        self._service: Service | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Start the engines. Ready when one of them is; raises the reason why the model cannot be served."""
        self._tasks.append(asyncio.create_task(self._engines.keep()))
        joining = asyncio.create_task(self._front_end.join(self._engines.addresses))
        refused = asyncio.create_task(self._refused.wait())
        await asyncio.wait((joining, refused), return_when=asyncio.FIRST_COMPLETED)
        refused.cancel()
        if not joining.done():
            joining.cancel()
            await self._end()
            raise self._reason
        service = self._service = joining.result()
        self._tasks.append(asyncio.create_task(_expire(service)))
        return Ingress(make_app(service))

    def check_health(self) -> None:
        """Red where only another replica would help: an engine that ends is restarted by this one."""
        if self._service is not None and self._service.is_permanently_down:
            raise EngineFailed(self._service.why_not_ready or "the engine is gone")
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise EngineFailed(f"engines are not watched any more: {task.exception()!r}")

    async def __del__(self) -> None:
        """Called by Ray when the requests are over, or their time is."""
        if self._service is not None:
            await self._service.drain(0.0)
            await self._front_end.close(self._service)
        await self._end()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engines.end()
        for member in self._members:
            ray.kill(member)
        self._stack.close()

    def _refuse(self, refusal: StartRefused) -> None:
        self._reason = REASONS.get(refusal.kind, EngineFailed)(refusal.message)
        self._refused.set()


async def _expire(service: Service) -> None:
    while True:
        service.expire()
        await asyncio.sleep(EXPIRE_INTERVAL_S)


class Ingress:
    """Quire's application below Serve's: `route_prefix` is cut off, and the start and the end need nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for done in ("lifespan.startup.complete", "lifespan.shutdown.complete"):
                await receive()
                await send({"type": done})
            return
        prefix = scope.get("root_path", "")
        path = scope["path"]
        if prefix and path.startswith(f"{prefix}/"):
            scope = {**scope, "path": path.removeprefix(prefix)}
        await self._app(scope, receive, send)


def new_group(size: int) -> GroupSettings:
    """A group led by this process, with a new secret."""
    host = ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
    return GroupSettings(size, 0, f"{host}:{port}", group_secret=secrets.token_hex(32))


def start_members(config: Config, settings: ServerSettings, deployment: RaySettings, group: GroupSettings) -> list[Any]:
    """An actor in each further bundle of the replica's placement group. Ray restarts those that are lost."""
    actor = ray.remote(MemberActor)
    members = []
    for rank in range(1, group.group_size):
        place = PlacementGroupSchedulingStrategy(get_current_placement_group(), placement_group_bundle_index=rank)
        options = {"num_cpus": deployment.num_cpus, "num_gpus": deployment.num_gpus, "max_restarts": -1}
        own = dataclasses.replace(group, group_rank=rank)
        members.append(actor.options(scheduling_strategy=place, **options).remote(config, settings, own))
    return members


class MemberActor:
    """An actor with a process that computes with the leader."""

    def __init__(self, config: Config, settings: ServerSettings, group: GroupSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=supervise_member, args=(config, settings, group, os.getpid()))
        self._process.start()


def supervise_member(config: Config, settings: ServerSettings, group: GroupSettings, parent: int) -> None:
    bind_to_parent("quire-member", parent)
    configure_logs(settings.log_format, settings.logging_level)
    from quire.server.processes.member import follow_leader

    follow_leader(config, settings, group, show_progress=False)


app = build_app({})
