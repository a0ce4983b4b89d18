"""The engine of a model, built in the engine process."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from quire.files.progress import Progress, logged, progress_bar, share_bar, silent
from quire.files.standard_error import standard_error
from quire.server.observe.logs import configure_logs
from quire.server.processes.engine_devices import EngineDevices
from quire.server.processes.start_phase import StartPhase
from quire.settings.adapters import adapter_places
from quire.settings.config import Config
from quire.settings.group import GroupSettings
from quire.settings.page_folder import FolderSettings
from quire.settings.peers import PeerSettings

log = logging.getLogger(__name__)


if TYPE_CHECKING:
    from quire.engine.building.build import Built
    from quire.engine.engine import Engine
    from quire.ipc.messages import Described, Waiting


@dataclass(frozen=True)
class ModelEngine:
    """An EngineBuilder. A plain value, since it travels to the engine process before anything is built."""

    config: Config
    log_format: str = "text"
    show_progress: bool = True
    log_level: int = logging.INFO
    group: GroupSettings | None = None  # of its leader
    number: int | None = None  # of several engines
    devices: EngineDevices = EngineDevices()
    peers: PeerSettings = PeerSettings()
    folder: FolderSettings = FolderSettings()

    def __call__(self, describe: "Callable[[Described | Waiting], None]") -> "Engine":
        self.devices.apply()
        configure_logs(self.log_format, self.log_level, self.number)
        from quire.files.model_files import locate
        from quire.ipc.messages import Described, Waiting

        bar, shares = (logged, logged) if self.log_format == "json" else (progress_bar, share_bar)
        stream = standard_error()
        is_shown = self.show_progress and self.log_format != "json" and stream is not None and stream.isatty()
        phase = StartPhase(lambda reason: describe(Waiting(reason)), logs=not is_shown)
        progress = phase.told(bar if self.show_progress else silent)
        files = locate(**self.config.place_of_model, progress=progress)
        # The front ends read the tokenizer while this process loads JAX, which they do without.
        describe(
            Described(
                name=files.name,
                tokenizer=None if files.tokenizer is None else str(files.tokenizer),
                end_ids=files.eos_token_ids,
                generation=asdict(files.generation),
                adapters=tuple(adapter_places(self.config)),
            )
        )
        phase.begin("loading JAX")
        from quire.engine.building.build import build_engine
        from quire.engine.building.plan import plan_deployment
        from quire.settings.host_cache import with_host_cache

        leader, meet = None, None
        if self.group is not None:
            from quire.engine.building.group import lead
            from quire.group.leader import Leader

            leader = Leader(self.group, lambda reason: describe(Waiting(reason)))
            meet = lead(leader, self.group)
        config = with_host_cache(self.config, self.peers, self.folder)
        deployment = plan_deployment(
            config, progress, files=files, is_served=True, meet=meet, num_engines=self.devices.num_engines
        )
        built = build_engine(deployment, progress, others=leader)
        if config.compile_ahead:
            self._compile(built, phase, shares)
        else:
            log.info("programs are compiled when requests first need them, which wait meanwhile")
        if self.peers.role is not None:
            from quire.engine.building.peers import meet_peers

            meet_peers(built, self.peers)
        if self.folder.cache_folder is not None:
            from quire.engine.building.folder import keep_pages

            keep_pages(built, self.folder)
        return built.engine

    def _compile(self, built: "Built", phase: StartPhase, bar: Progress) -> None:
        """Make the programs without which it does not begin."""
        programs = built.executor.programs
        is_kept = programs.can_begin_at_once
        work = "loading" if is_kept else "compiling"

        def so_far() -> str:
            num_made, num_needed = programs.num_made_of_needed
            return f"{work} {num_made} of {num_needed} programs"

        phase.begin(so_far())
        with (bar if self.show_progress and not is_kept else silent)("Compiling") as report:
            for share in built.warm_up():
                report(round(share * 1000), 1000)
                phase.note(so_far())
                if programs.can_run_anything:
                    report(1000, 1000)  # enough to begin; the rest is compiled behind the first requests
                    programs.begin_serving()
                    break
