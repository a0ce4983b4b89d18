"""A cluster of Ray on this machine, for `make test-ray`. Without its variable these tests are not collected."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.processes import free_port
from tests.tiny_chat_model import SIZES, write_tiny_chat_model

CACHE = Path(__file__).parents[2] / ".venv-ray" / "cache"  # of what is compiled, from one run to the next
collect_ignore_glob = [] if os.environ.get("QUIRE_RAY") else ["test_*.py"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of its proxy."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray gives its processes 15, the last on a busy machine
    import ray
    from ray import serve

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Those of a small model."""
    model = write_tiny_chat_model(tmp_path_factory.mktemp("ray"))
    return SIZES | {"model": model, "cache_dir": str(CACHE), "num_cpus": 0.5, "drain_s": 5}


@pytest.fixture
def start(cluster: str, settings: dict[str, Any]) -> Iterator[Callable[..., str]]:
    """Starts an application; its address."""
    from ray import serve

    from quire.ray import build_app

    def run(**more: Any) -> str:
        serve.run(build_app(settings | more), route_prefix="/")
        return cluster

    yield run
    serve.delete("default")
