"""The process of an HTTP worker."""

import asyncio
import os
import resource
import socket

from quire.engine.garbage_collection import relax_gc
from quire.ipc.supervisor_link import bind_to_parent
from quire.seeds import Seeds
from quire.server.observe.logs import configure_logs
from quire.server.rate_limits import RateLimits
from quire.server.settings import ServerSettings


def run_worker(
    addresses: list[str],
    number: int,
    settings: ServerSettings,
    chat_template: str | None,
    limits: RateLimits,
    seeds: Seeds,
    listeners: list[socket.socket],
    line: socket.socket,
    parent: int,
    is_first: bool,
) -> None:
    """`line` leads to the supervisor, process `parent`. `is_first`: it replaces no other worker."""
    bind_to_parent("quire-http", parent)
    relax_gc()
    configure_logs(settings.log_format, settings.logging_level)
    from quire.server.processes.front_end import FrontEnd  # the supervisor imports this module and does without

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client is a file; shells allow a thousand
    front_end = FrontEnd(settings, number, chat_template, limits, seeds)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(front_end.run(addresses, listeners, line, lambda: os._exit(1), is_first=is_first))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
