"""A group member other than the leader: it does not serve HTTP, and runs the leader's programs."""

import asyncio
import logging
import os
import socket
import threading

from quire.engine.garbage_collection import relax_gc
from quire.errors import InvalidSetting, QuireError
from quire.files.progress import logged, progress_bar, silent
from quire.group.link import SILENCE_S
from quire.ipc.supervisor_link import (
    ALIVE_INTERVAL_S,
    Alive,
    ControlMessage,
    StartRefused,
    Stop,
    Up,
    bind_to_parent,
    open_link,
)
from quire.server.observe.logs import configure_logs
from quire.server.processes.child import Child, first_of
from quire.server.processes.engine_processes import STOP_S
from quire.server.processes.supervisor import REASONS, STOP_SIGNALS
from quire.server.processes.watchdog import Silence, watching
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.group import GroupSettings

log = logging.getLogger(__name__)

LEADER_LOST = 72  # exit status of a process that has lost its leader
AGAIN_S = 1.0  # after any other end


def follow_leader(config: Config, settings: ServerSettings, group: GroupSettings, *, show_progress: bool) -> None:
    """Be a member of a group until a signal comes. Raises the reason why it cannot be one."""

    async def run() -> None:
        await MemberSupervisor(config, settings, group, show_progress).run()

    asyncio.run(run())


class MemberSupervisor:
    """Keeps a process that computes with the leader, one for each time that the group begins. Owned by its event loop.

    Told to stop while the group works, it waits for the leader to end: its requests need all members.
    """

    def __init__(self, config: Config, settings: ServerSettings, group: GroupSettings, show_progress: bool) -> None:
        self._config = config
        self._settings = settings
        self._group = group
        self._show_progress = show_progress
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        while not self._stopping.is_set():
            child = await self._start()
            silence = Silence("the member's process", 2 * SILENCE_S)  # the leader has given up on it by then
            try:
                async with watching(child, silence, silence):
                    await first_of(child.ended, child.refused, self._stopping)
                    await self._drain(child)
            finally:
                child.kill()
                await child.ended.wait()
            if child.refusal is not None:
                raise REASONS.get(child.refusal.kind, InvalidSetting)(child.refusal.message)
            if not self._stopping.is_set() and child.exit_code != LEADER_LOST:
                log.error("the member's process ended (%s); starting it again", child.exit_status)
                await asyncio.sleep(AGAIN_S)

    async def _start(self) -> Child:
        settings, level = self._settings, self._settings.logging_level
        return await Child(
            "quire-member",
            run_member,
            lambda line: (
                self._config, self._group, settings.log_format, level, self._show_progress, line, os.getpid()
            ),
        ).connected()  # fmt: skip

    async def _drain(self, child: Child) -> None:
        """Let the leader finish, where it needs this member."""
        if child.up.is_set() and not child.ended.is_set() and child.refusal is None:
            log.info("stopping once the leader has; up to %g s", self._settings.drain_s)
            waiting = asyncio.create_task(first_of(child.ended, self._at_once))
            await asyncio.wait({waiting}, timeout=self._settings.drain_s + STOP_S)
            waiting.cancel()

    def _on_signal(self) -> None:
        (self._at_once if self._stopping.is_set() else self._stopping).set()


def run_member(
    config: Config,
    group: GroupSettings,
    log_format: str,
    log_level: int,
    show_progress: bool,
    line: socket.socket,
    parent: int,
) -> None:
    """The process that computes, from its start to its end. `line` leads to the supervisor, process `parent`."""
    bind_to_parent("quire-member", parent)
    relax_gc()
    configure_logs(log_format, log_level)

    def lost(reason: str) -> None:
        """Called on any thread. Nothing can be computed without the leader, and JAX would end the process soon."""
        log.warning("the leader at %s is lost: %s", group.group_address, reason)
        logging.shutdown()
        os._exit(LEADER_LOST)

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def on_control(message: ControlMessage) -> None:
            if isinstance(message, Stop):
                os._exit(0)

        link = await open_link(line, on_control, lambda: os._exit(1))

        def send(message: ControlMessage) -> None:
            loop.call_soon_threadsafe(link.send, message)

        def compute() -> None:
            from quire.engine.building.group import follow  # loads JAX
            from quire.group.membership import RefusedByLeader

            try:
                bar = logged if log_format == "json" else progress_bar
                progress = bar if show_progress else silent
                follow(config, group, lost, lambda: send(Up()), progress)
            except RefusedByLeader as error:
                send(
                    StartRefused(
                        InvalidSetting.kind, f"the leader at {group.group_address} refuses this member: {error}"
                    )
                )
            except QuireError as error:
                send(StartRefused(error.kind, error.message))
            except Exception:  # the leader knows, and ends the group
                log.exception("the member cannot continue")
                logging.shutdown()
                os._exit(1)

        threading.Thread(target=compute, name="quire-member", daemon=True).start()
        while True:
            link.send(Alive())
            await asyncio.sleep(ALIVE_INTERVAL_S)

    asyncio.run(run())
