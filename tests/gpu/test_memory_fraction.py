"""Two servers on one GPU, by the shares of its memory that each may take.

Run it by itself, since JAX takes most of a GPU for other tests: `pytest -n 0 -m gpu tests/gpu/test_memory_fraction.py`.
Also runs where there is no GPU.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests import web
from tests.patience import WAIT_S
from tests.process_log import ProcessLog
from tests.server.processes import free_port, wait_until
from tests.tiny_chat_model import write_tiny_chat_model

pytestmark = pytest.mark.gpu
FRACTION = 0.4


def free_fraction() -> float:
    """Of the first GPU; 1 where there is none."""
    if shutil.which("nvidia-smi") is None:
        return 1.0
    query = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    free, total = subprocess.check_output(query, text=True).splitlines()[0].split(",")
    return int(free) / int(total)


@contextmanager
def served(model: str) -> Iterator[str]:
    """The URL of a server in processes of its own."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = ["serve", model, "--port", str(port), "--cuda-memory-fraction", str(FRACTION)]
    process = subprocess.Popen([sys.executable, "-m", "quire", *command], stderr=subprocess.PIPE, text=True)
    log = ProcessLog(process)
    try:
        wait_until(lambda: process.poll() is not None or is_ready(url))
        assert process.poll() is None, log.whole()
        yield url
    finally:
        process.terminate()
        process.wait(WAIT_S)
        log.show()


def is_ready(url: str) -> bool:
    try:
        return web.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_two_servers_share_a_gpu_by_their_fractions(tmp_path: Path) -> None:
    if free_fraction() < 2 * FRACTION + 0.1:
        pytest.skip("another process has taken memory of the GPU")
    model = write_tiny_chat_model(tmp_path)
    with ExitStack() as stack:
        urls = [stack.enter_context(served(model)) for _ in range(2)]
        body = {"prompt": list(range(3, 40)), "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        answers = [web.post(f"{url}/v1/completions", json=body).json() for url in urls]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [32, 32]
