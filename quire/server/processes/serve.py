"""The processes of a server: one engine, and one or more that speak HTTP."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from quire.config import Config
from quire.group.settings import GroupSettings
from quire.ipc.server import new_address
from quire.server.http.listener import open_listener, open_listeners
from quire.server.http.tls import check_certificate
from quire.server.observe.logs import configure_logs
from quire.server.processes.engine_process import EngineBuilder
from quire.server.processes.member import follow_leader
from quire.server.processes.model_engine import ModelEngine
from quire.server.processes.supervisor import Supervisor
from quire.server.settings import ServerSettings


def serve(
    config: Config, settings: ServerSettings, group: GroupSettings | None = None, *, show_progress: bool = True
) -> None:
    """Serve a model until a signal comes. Raises the reason why it cannot be served.

    A process that is not the leader of its group serves nothing: it computes with the leader.
    """
    configure_logs(settings.log_format, settings.logging_level)
    if group is not None and group.is_group:
        group.secret()  # raises where there is none
        if not group.is_leader:
            follow_leader(config, settings, group, show_progress=show_progress)
            return
    leads = group if group is not None and group.is_group else None
    engine = ModelEngine(config, settings.log_format, show_progress, settings.logging_level, leads)
    serve_engine(engine, settings, config.chat_template)


def serve_engine(
    build: EngineBuilder,
    settings: ServerSettings,
    chat_template: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve the engine that `build` makes. This process supervises those that do the work."""
    check_certificate(settings)
    listeners = [[one] for one in open_listeners(settings.host, settings.port, settings.http_workers)]
    host, port = listeners[0][0].getsockname()[:2]
    if settings.prometheus_port is not None:
        listeners[0].append(open_listener(settings.host, settings.prometheus_port, shared=False))
    scheme = "http" if settings.ssl_certfile is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def run(address: str, settings: ServerSettings) -> None:
        supervisor = Supervisor(
            build, settings, chat_template, address, listeners, lambda: (announce or print_ready)(url)
        )
        await supervisor.run()

    with new_address() as address, _with_shared_store(settings) as shared:
        asyncio.run(run(address, shared))


@contextlib.contextmanager
def _with_shared_store(settings: ServerSettings) -> Iterator[ServerSettings]:
    """Several HTTP processes keep responses in one file, so that each finds those of the others. Unless the settings
    name one, it goes with the server."""
    if settings.response_store is not None or settings.http_workers == 1:
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        yield replace(settings, response_store=str(Path(folder) / "responses.sqlite"))


def print_ready(address: str) -> None:
    line = f"Ready. Chat: {address}  API: {address}/v1  (process {os.getpid()})"
    print(line, file=sys.stderr, flush=True)
