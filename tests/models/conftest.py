"""Programs of these tests are kept from run to run: none of them goes into Quire's own store."""

from collections.abc import Iterator

import pytest

from tests.shared_programs import shared


@pytest.fixture(scope="module", autouse=True)
def _shared_programs() -> Iterator[None]:
    with shared():
        yield
