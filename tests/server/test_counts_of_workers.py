"""Counts of several HTTP workers only ever grow, whichever process ends."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from quire.ipc.worker_counts import Counts, KnownCounts
from tests import web
from tests.server.processes import Served, wait_until

SMALL = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
NUM_REQUESTS = 12
ALL = {f"tgi_request_count {NUM_REQUESTS}"}


@pytest.fixture
def served(model_folder) -> Iterator[Served]:
    one = Served(model_folder, "http_workers=2").wait()
    yield one
    one.stop()


def counted(served: Served) -> set[str]:
    """What several connections are told, whichever workers they reach; one that ends tells nothing."""
    found: set[str] = set()
    for _ in range(6):
        try:
            page = web.get(f"{served.url}/metrics").text
        except httpx.TransportError:
            continue
        found |= {line for line in page.splitlines() if line.startswith("tgi_request_count ")}
    return found


def replace(served: Served, name: str, pid: int) -> None:
    """Kill a process and wait for the next one, while everybody is told the same."""
    others = set(served.named(name)) - {pid}
    os.kill(pid, signal.SIGKILL)

    def is_replaced() -> bool:
        assert counted(served) <= ALL
        return len(set(served.named(name)) - others - {pid}) == 1

    wait_until(is_replaced)
    wait_until(lambda: web.get(f"{served.url}/health").status_code == 200)


def test_no_count_is_lost_with_the_process_that_counted(served):
    for _ in range(NUM_REQUESTS):
        served.ask(SMALL)
    wait_until(lambda: counted(served) == ALL)
    first, second = served.named("quire-http")
    replace(served, "quire-http", first)
    replace(served, "quire-http", second)  # from now on only those answer that have counted nothing
    assert counted(served) <= ALL
    replace(served, "quire-engine", served.engine_pid())
    assert counted(served) <= ALL
    for pid in served.named("quire-http"):  # and so do those that never met them
        replace(served, "quire-http", pid)
    wait_until(lambda: counted(served) == ALL)
    served.ask(SMALL)
    wait_until(lambda: counted(served) == {f"tgi_request_count {NUM_REQUESTS + 1}"})


def test_older_counts_do_not_replace_newer_ones():
    known = KnownCounts()
    known.hear({1: Counts(2, {"a": 20}, {}, {}), 2: Counts(1, {"a": 5}, {}, {})})
    known.hear({1: Counts(1, {"a": 10}, {}, {}), 2: Counts(3, {"a": 7}, {}, {})})
    assert [counts.numbers["a"] for counts in known.by_worker.values()] == [20, 7]
