"""A server with a fake engine, as processes: python -m tests.server.serve_fake FOLDER [setting=value ...]"""

import sys
from pathlib import Path
from typing import Any

from quire.errors import QuireError
from quire.server.processes.serve import serve_engines
from quire.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine


def main(folder: str, *settings: str) -> None:
    given: dict[str, Any] = dict(setting.split("=", 1) for setting in settings)
    for name, value in given.items():
        if name.endswith("_s"):
            given[name] = float(value)
        elif value.isdecimal():
            given[name] = int(value)
    engine = FakeEngine(
        Path(folder),
        step_s=given.pop("step_s", 0.0),
        refuses=bool(given.pop("refuses", 0)),
        build_s=given.pop("build_s", 0.0),
        adapters=Path(given.pop("adapters")) if "adapters" in given else None,
        builds_after=Path(given.pop("builds_after")) if "builds_after" in given else None,
        phases=(given.pop("phase"),) if "phase" in given else (),
    )
    try:
        settings = ServerSettings(**({"port": 0} | given))
        serve_engines([engine] * settings.data_parallel, settings, announce=lambda address: print(address, flush=True))
    except QuireError as error:
        sys.exit(f"{error.kind}: {error.message}")


if __name__ == "__main__":
    main(*sys.argv[1:])
