"""The processes of a server: those with engines, and those that speak HTTP."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from quire.files.standard_error import show
from quire.ipc.address import new_address
from quire.server.http.listener import open_listener, open_listeners
from quire.server.http.tls import check_certificate
from quire.server.observe.logs import configure_logs
from quire.server.processes.engine_builder import EngineBuilder
from quire.server.processes.engine_devices import divide_devices, visible_cores, visible_gpus
from quire.server.processes.engine_processes import engine_places
from quire.server.processes.model_engine import ModelEngine
from quire.server.processes.supervisor import Supervisor
from quire.server.processes.temporary_folder import remove_abandoned, temporary_folder
from quire.server.running_servers import announced
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.group import GroupSettings
from quire.settings.page_folder import FolderSettings
from quire.settings.peers import PeerSettings
from quire.settings.refusals import Case, refuse, settings_of

log = logging.getLogger(__name__)


def serve(
    config: Config,
    settings: ServerSettings,
    group: GroupSettings | None = None,
    peers: PeerSettings | None = None,
    folder: FolderSettings | None = None,
    *,
    show_progress: bool = True,
) -> None:
    """Serve a model until a signal comes. Raises the reason why it cannot be served.

    A process that is not the leader of its group serves nothing: it computes with the leader.
    """
    configure_logs(settings.log_format, settings.logging_level)
    folder, peers = folder or FolderSettings(), peers or PeerSettings()
    refuse(Case(settings_of(config, settings, group or GroupSettings(), peers, folder)))
    folder.check()
    if group is not None and group.is_group:
        group.secret()  # raises where there is none
        if not group.is_leader:
            from quire.server.processes.member import follow_leader

            follow_leader(config, settings, group, show_progress=show_progress)
            return
    if peers.role is not None:
        peers.secret()  # the same
    leads = group if group is not None and group.is_group else None
    level = settings.logging_level
    first = ModelEngine(config, settings.log_format, show_progress, level, leads, peers=peers, folder=folder)
    serve_engines(model_engines(first, settings.data_parallel), settings, config.chat_template)


def model_engines(first: ModelEngine, count: int) -> list[ModelEngine]:
    """A builder for each engine, like the first but on other devices. Only the first one shows progress."""
    if count == 1:
        return [first]
    parts = divide_devices(count, first.config.tensor_parallel, visible_gpus(os.environ), visible_cores())
    return [
        replace(first, number=number, devices=devices, show_progress=first.show_progress and not number)
        for number, devices in enumerate(parts)
    ]


def serve_engines(
    builds: Sequence[EngineBuilder],
    settings: ServerSettings,
    chat_template: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve the engines that `builds` make. This process supervises those that do the work."""
    check_certificate(settings)
    remove_abandoned()
    listeners = [[one] for one in open_listeners(settings.host, settings.port, settings.http_workers)]
    host, port = listeners[0][0].getsockname()[:2]
    if settings.prometheus_port is not None:
        listeners[0].append(open_listener(settings.host, settings.prometheus_port, shared=False))
    scheme = "http" if settings.ssl_certfile is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def run(addresses: list[str], settings: ServerSettings) -> None:
        places = engine_places(builds, addresses)
        tell = announce or (log_ready if settings.log_format == "json" else print_ready)
        await Supervisor(places, settings, chat_template, listeners, lambda: tell(url)).run()

    with contextlib.ExitStack() as stack:
        stack.enter_context(announced(url))
        addresses = [stack.enter_context(new_address()) for _ in builds]
        asyncio.run(run(addresses, stack.enter_context(_with_shared_store(settings))))


@contextlib.contextmanager
def _with_shared_store(settings: ServerSettings) -> Iterator[ServerSettings]:
    """Several HTTP processes keep responses in one file, so that each finds those of the others. Unless the settings
    name one, it goes with the server."""
    if settings.response_store is not None or settings.http_workers == 1:
        yield settings
        return
    with temporary_folder() as folder:
        yield replace(settings, response_store=str(folder / "responses.sqlite"))


def print_ready(address: str) -> None:
    show(f"Ready. Chat: {address}  API: {address}/v1  (process {os.getpid()})")


def log_ready(address: str) -> None:
    """The same where each line of standard error is an object."""
    log.info("Ready.", extra={"chat": address, "api": f"{address}/v1", "supervisor": os.getpid()})
