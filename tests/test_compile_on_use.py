"""A server without compilation ahead: it begins at once, and requests wait for the programs that they first need."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quire.files.cache_folder import cache_folder
from tests import web
from tests.patience import WAIT_S
from tests.process_log import ProcessLog
from tests.server.processes import wait_until
from tests.tiny_chat_model import SIZES, write_tiny_chat_model

BODIES: list[dict[str, Any]] = [
    {"prompt": "a", "max_tokens": 5},
    {"prompt": "a longer prompt, which takes several steps to be computed", "max_tokens": 9},
    {"prompt": "b", "max_tokens": 4, "logprobs": 2},
    {"prompt": "scored", "max_tokens": 3, "echo": True, "logprobs": 1},
    {"prompt": "c", "max_tokens": 6, "n": 2, "temperature": 0.7, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.5},
    {"prompt": "d", "max_tokens": 8, "guided_regex": "[ab]{4}"},
]


def metrics(url: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in web.get(f"{url}/metrics").text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, value in lines}


def test_a_server_that_compiles_nothing_ahead_answers_whatever_is_asked(tmp_path: Path) -> None:
    model, cache = write_tiny_chat_model(tmp_path / "model"), tmp_path / "cache"
    cache.mkdir()
    (cache / "native").symlink_to(cache_folder() / "native")
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    running = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", model, "--port=0", "--no-compile-ahead", f"--cache-dir={cache}",
         *sizes],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = ProcessLog(running)
    try:
        url = ready_url(log, running)
        wait_until(lambda: "quire_late_compilations" in metrics(url))
        before = metrics(url)
        assert (before["quire_late_compilations"], before["quire_unfinished_programs"]) == (0, 0)

        def ask(body: dict[str, Any]) -> list[Any]:
            answer = web.post(f"{url}/v1/completions", json={"temperature": 0} | body)
            assert answer.status_code == 200, answer.text
            return [(one["text"], one["finish_reason"]) for one in answer.json()["choices"]]

        with ThreadPoolExecutor(len(BODIES)) as pool:
            together = list(pool.map(ask, BODIES))
        assert web.get(f"{url}/health").status_code == 200
        assert metrics(url)["quire_late_compilations"] > 0
        assert [ask(body) for body in BODIES] == together
    finally:
        running.terminate()
        running.wait(WAIT_S)
    told = log.whole()
    assert "programs are compiled when requests first need them" in told
    assert "a step waits for a program to be compiled" in told
    assert "WARNING" not in told


def ready_url(log: ProcessLog, process: "subprocess.Popen[str]") -> str:
    def found() -> list[str]:
        return [word for line in log.lines() if "Ready." in line for word in line.split() if word.startswith("http")]

    wait_until(lambda: bool(found()) or process.poll() is not None)
    assert found(), log.whole()
    return found()[0]
