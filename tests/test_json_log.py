"""With --log-format json, whatever a server writes is one object a line: programs read it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import web
from tests.patience import WAIT_S
from tests.tiny_chat_model import SIZES, program_folder, write_tiny_chat_model


def test_a_server_writes_objects_from_its_start_to_its_end(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = write_tiny_chat_model(tmp_path / "model")
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    running = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", model, "--port=0", "--log-format=json", "--no-compile-ahead",
         f"--cache-dir={program_folder(tmp_path_factory)}", *sizes],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines: list[dict[str, Any]] = []
    try:
        assert running.stderr is not None
        for line in running.stderr:
            lines.append(json.loads(line))
            if lines[-1]["message"] == "Ready.":
                break
        ready = lines[-1]
        assert ready["supervisor"] == running.pid
        assert ready["api"] == f"{ready['chat']}/v1"
        odd = {"model": "no\nsuch \u2028 model", "messages": [{"role": "user", "content": "hi"}], "user": "a\x1b[31m\n"}
        assert web.post(f"{ready['api']}/chat/completions", json=odd).status_code == 404
        assert web.post(f"{ready['api']}/chat/completions", json=odd | {"model": "default"}).status_code == 200
    finally:
        running.terminate()
        _, rest = running.communicate(timeout=WAIT_S)
    lines += [json.loads(line) for line in rest.splitlines()]
    messages = [line["message"] for line in lines]
    assert "Making random weights is done" in messages
    assert [line["user"] for line in lines if "user" in line] == [odd["user"]]
    assert {line["level"] for line in lines} <= {"INFO", "WARNING"}


def test_so_is_the_reason_why_it_does_not_start(tmp_path: Path) -> None:
    for arguments, code, reason in (
        (["/no/such/model", "--port=0"], 1, "'/no/such/model': no such file or folder"),
        (["random:tiny", "--host=192.0.2.1"], 2, "cannot listen on 192.0.2.1"),
    ):
        command = [sys.executable, "-m", "quire", "serve", *arguments, "--log-format=json", f"--cache-dir={tmp_path}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        *_, last = map(json.loads, ended.stderr.splitlines())
        assert (ended.returncode, last["level"]) == (code, "CRITICAL")
        assert last["message"].startswith(reason)
