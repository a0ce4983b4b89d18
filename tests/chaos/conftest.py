"""Servers for the chaos tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.server import Server
from tests.server.vocabulary import TEMPLATE, tokenizer

LONG = pytest.mark.skipif(os.environ.get("QUIRE_CHAOS") != "long", reason="takes its time; part of `make chaos`")


def write_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer()._backend.to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def serve(fake_model: Path) -> Iterator[Callable[..., Server]]:
    """A server with the fake model; `asked` as for Server."""
    made: list[Server] = []

    def start(kind: str = "fake", folder: Path | str | None = None, **asked: Any) -> Server:
        made.append(Server(kind, folder or fake_model, **asked))
        return made[-1].wait()

    yield start
    for one in made:
        one.stop()
