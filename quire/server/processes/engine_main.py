"""The process of an engine."""

import asyncio
import logging
import os
import socket

from quire.engine.garbage_collection import relax_gc
from quire.ipc.journal import Journal
from quire.ipc.supervisor_link import bind_to_parent, open_link
from quire.server.processes.engine_builder import EngineBuilder


def run_engine(
    name: str, address: str, build: EngineBuilder, line: socket.socket, journal: Journal, num_before: int, parent: int
) -> None:
    """The engine process, from its start to its end. `line` leads to the supervisor, process `parent`."""
    bind_to_parent(name, parent)
    relax_gc()
    from quire.server.processes.engine_process import (
        EngineProcess,  # the supervisor imports this module and does without
    )

    async def run() -> None:
        process = EngineProcess(address, build, journal, num_before)
        process.link = await open_link(line, process.on_control, process.stop)
        status = await process.run()
        logging.shutdown()
        # Not a return: a thread that still builds, or a step that never ends, must not keep the process.
        os._exit(status)

    asyncio.run(run())
