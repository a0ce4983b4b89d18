"""The server of the chaos tests: python -m tests.chaos.serve KIND FOLDER JSON

KIND is fake or model; JSON has `settings`, `faults` and, for fake, `engine` or, for model, `config`. A process that
starts may be silent for `starting_factor` times as long as one that runs: a busy machine starts it slowly.
"""

import json
import sys
from pathlib import Path

from quire.errors import QuireError
from quire.server.observe.logs import configure_logs
from quire.server.processes import engine_processes, supervisor
from quire.server.processes.serve import serve_engines
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from tests.chaos.engines import FakeModel, FaultyModel
from tests.chaos.faulty import Faults


def main(kind: str, folder: str, given: str) -> None:
    asked = json.loads(given)
    faults = Faults(**asked.get("faults", {}))
    configure_logs("text")
    for module in (engine_processes, supervisor):
        module.STARTING_FACTOR = asked.get("starting_factor", 100)
    build = (
        FakeModel(Path(folder), faults=faults, **asked.get("engine", {}))
        if kind == "fake"
        else FaultyModel(Config(model=folder, **_paths(asked.get("config", {}))), faults)
    )
    try:
        settings = ServerSettings(**({"port": 0} | asked.get("settings", {})))
        serve_engines([build] * settings.data_parallel, settings, announce=lambda address: print(address, flush=True))
    except QuireError as error:
        sys.exit(f"{error.kind}: {error.message}")


def _paths(config: dict) -> dict:
    return {name: Path(value) if name.endswith("_dir") else value for name, value in config.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
