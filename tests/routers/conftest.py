"""Routers for the tests of `make test-routers`. Without its variable they are not collected: they need packages."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import write_tokenizer
from tests.routers.fleet import ROUTERS, Fleet, Router

collect_ignore_glob = [] if os.environ.get("QUIRE_ROUTERS") else ["test_*.py"]


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("fake"))


@pytest.fixture(params=ROUTERS, ids=lambda router: router.name)
def router(request: pytest.FixtureRequest) -> Router:
    return request.param


@pytest.fixture
def start(router: Router, fake_model: Path) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def start(*flags: str, **asked: Any) -> Fleet:
        made.append(Fleet(router, fake_model, *flags, **asked))
        return made[-1]

    yield start
    for fleet in made:
        fleet.stop()
