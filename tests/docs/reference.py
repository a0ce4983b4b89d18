"""The reference pages that are written from the code: `make docs-reference` runs this module."""

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from typer.main import get_command

from quire.cli import make_app
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.meter import attach_meter, read_stats
from quire.ipc.messages import Stats
from quire.server.observe.endpoint_metrics import write_endpoint
from quire.server.observe.engine_metrics import write_engines
from quire.server.observe.exposition import Exposition, Histogram
from quire.server.observe.metrics import Metrics
from tests.core.harness import limits
from tests.docs.family_features import models_page
from tests.fake_executor import FakeExecutor

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SETTINGS_HEAD = """\
# Settings

Every setting of `quire serve` is an option, an environment variable and a key of a TOML file (`--config quire.toml`,
with `max_batch_size = 8`). Options override variables, and variables override the file. Settings that are left open
are chosen for the machine and the model. The choice is logged with its reason, and `quire doctor` shows it.

Variables begin with `QUIRE_`. A second name is an alias of another program: text-generation-inference's, or the hub
client's. `QUIRE_…` wins where both are set.
[The flags of text-generation-inference](../operations/from-tgi.md) have a page of their own.

`quire generate`, `chat`, `doctor` and `bench offline` have the engine's settings, Model to Devices, by the same names.

This page is written by `make docs-reference`.
"""
METRICS_HEAD = """\
# Metrics

Every metric of `GET /metrics`, as its `HELP` and `TYPE` lines have it.
[Metrics in detail](../operations/metrics.md) says how they relate and what to watch.

The label `engine` is there with `--data-parallel` above 1 only. `quire_key_…` exist where the server has API keys,
`quire_peer_…` where it has a role, `quire_folder_…` and `quire_pages_in_folder` with `--cache-folder`.

This page is written by `make docs-reference`.
"""
# Counters that engines of every role together have.
PEER_COUNTERS = ("received_pages", "sent_pages", "received_bytes", "sent_bytes", "pulls_received", "served_sent")
FOLDER_COUNTERS = (
    "pages", "bytes", "read_pages", "written_pages", "read_bytes", "written_bytes", "reads_found", "saves_written",
    "removed_corrupt", "read_errors", "write_errors",
)  # fmt: skip


class Family(NamedTuple):
    kind: str
    name: str
    help: str
    labels: tuple[str, ...]


class Families(Exposition):
    """An exposition that remembers its families."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Family] = []

    def family(
        self, kind: str, name: str, help: str, values: Iterable[tuple[Mapping[str, str], float | Histogram]]
    ) -> None:
        first = next(iter(values), ({}, 0))
        self.found.append(Family(kind, name, help, tuple(first[0])))


def sample_stats() -> Stats:
    """Statistics of an engine that has done nothing, with the counters of every role."""
    chosen = limits(num_pages=10, max_loras=1)
    executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size)
    engine = Engine(Scheduler(chosen, time.monotonic), executor)
    stats = read_stats(engine, attach_meter(engine))
    elsewhere = [f"peer_{name}" for name in PEER_COUNTERS] + [f"folder_{name}" for name in FOLDER_COUNTERS]
    more = dict.fromkeys(["restarts", *elsewhere], 0)
    return msgspec.structs.replace(stats, counters=stats.counters | more)


def families() -> list[Family]:
    out = Families()
    Metrics(4096, 4096, keys=["key-1"]).write(out)
    write_engines(out, {0: sample_stats()}, is_labelled=True)
    write_endpoint(out, sample_stats(), "model")
    out.gauge("quire_engine_up", "Engines that would answer requests.", 1, {"engine": "0"})
    return sorted(out.found, key=lambda family: (not family.name.startswith("quire"), family.name))


def metrics_page() -> str:
    rows = [
        f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.help} |"
        for one in families()
    ]
    return "\n".join([METRICS_HEAD, "| name | type | labels | what |", "|---|---|---|---|", *rows]) + "\n"


def serve_options() -> Iterator[Any]:
    """The options of `quire serve` that its help shows, in order."""
    command = get_command(make_app(["serve"]))
    serve = getattr(command, "commands", {}).get("serve", command)
    for parameter in serve.params:
        if parameter.param_type_name == "option" and not parameter.hidden and parameter.rich_help_panel:
            yield parameter


def settings_page() -> str:
    lines = [SETTINGS_HEAD]
    panels: dict[str, list[Any]] = {}
    for option in serve_options():
        panels.setdefault(option.rich_help_panel, []).append(option)
    for title, options in panels.items():
        if title.startswith("As text-generation-inference"):
            continue  # on the page of its own
        lines += [f"## {title}\n", "| option | variable | default | what |", "|---|---|---|---|"]
        lines += [_row(option) for option in options]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    variables = "<br>".join(f"`{name}`" for name in option.envvar or ())
    default = (
        ""
        if option.default in (None, "", (), [])
        else f"`{str(option.default).lower() if isinstance(option.default, bool) else option.default}`"
    )
    return f"| {names} | {variables} | {default} | {_escaped(option.help)} |"


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page, "../models.md": models_page}


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name, write in PAGES.items():
        (REFERENCE / name).write_text(write(), encoding="utf-8")


if __name__ == "__main__":
    main()
