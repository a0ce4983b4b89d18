"""Servers for tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.running import RunningServer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One for all tests that only ask."""
    running = RunningServer().start()
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
