"""Compiles as a server does."""

from collections.abc import Iterator

import pytest

from tests.compiling import as_served


@pytest.fixture(scope="module", autouse=True)
def _as_served() -> Iterator[None]:
    with as_served():
        yield
