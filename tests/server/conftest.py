"""Servers for tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.processes import Served
from tests.server.running import RunningServer
from tests.server.vocabulary import JSON_PIECES, TEMPLATE, TOOL_TEMPLATE, served_model, tokenizer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One for all tests that only ask. Adapters may be loaded; there is a folder of one, `style`."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "style").mkdir()
    (folder / "style" / "adapter_config.json").write_text("{}")
    running = RunningServer(adapter_folder=folder, max_loras=1).start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def caller() -> Iterator[RunningServer]:
    """One whose template knows tools, and whose fake can spell JSON and calls."""
    model = served_model(2048, end_ids=(0,), pieces=JSON_PIECES, template=TOOL_TEMPLATE)
    running = RunningServer(model=model, max_sequence_tokens=2048, num_pages=6000).start()
    yield running
    running.stop()


@pytest.fixture
def make_server() -> Iterator[Callable[..., RunningServer]]:
    """Those with settings of their own."""
    made: list[RunningServer] = []

    def make(**options: Any) -> RunningServer:
        made.append(RunningServer(**options))
        return made[-1].start()

    yield make
    for one in made:
        one.stop()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_text(tokenizer()._backend.to_str())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def served(model_folder: Path) -> Iterator[Served]:
    """One as processes, for all tests that only ask."""
    one = Served(model_folder).wait()
    yield one
    one.stop()
