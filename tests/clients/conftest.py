"""The server that `make test-clients` started, for the tests of real clients.

These tests run in environments of their own, without Quire. They are not collected when no server is named, so
`make test` leaves them out.
"""

import os

import pytest

URL = os.environ.get("QUIRE_CLIENTS_URL", "")
collect_ignore_glob = [] if URL else ["test_*.py"]


@pytest.fixture(scope="session")
def url() -> str:
    return URL


@pytest.fixture(scope="session")
def v1() -> str:
    return f"{URL}/v1"


@pytest.fixture(scope="session")
def key() -> str:
    return os.environ["QUIRE_CLIENTS_KEY"]


@pytest.fixture(scope="session")
def model() -> str:
    return os.environ["QUIRE_CLIENTS_MODEL"]


@pytest.fixture(scope="session")
def too_long() -> str:
    """A text of more tokens than the model's context has."""
    return "one two three " * 3000
