"""Logs of servers that run as processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process_log import MAX_LINES, MAX_SHOWN_LINES, ProcessLog

TEST_THAT_FAILS = """
import subprocess, sys
from tests.process_log import ProcessLog

def start(word):
    command = [sys.executable, "-c", f"import sys; print({word!r} + ' closed', file=sys.stderr)"]
    return ProcessLog(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))

def test_that_fails():
    shared, own = start("shared"), start("own")
    assert shared.whole() == "shared closed"
    try:
        raise RuntimeError("disconnected")
    finally:
        own.show()
"""


def start(program: str) -> ProcessLog:
    return ProcessLog(subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True))


def test_more_lines_than_a_pipe_holds_are_read_and_the_last_ones_kept() -> None:
    log = start(f"import sys\nfor n in range({MAX_LINES + 10}): print('line', n, file=sys.stderr)")
    lines = log.whole().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("line 10", f"line {MAX_LINES + 9}", MAX_LINES)
    assert log.take_unshown()[1].splitlines() == lines[-MAX_SHOWN_LINES:]


def test_lines_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = start("import sys; print('once', file=sys.stderr)")
    log.show()
    assert capsys.readouterr().out.endswith(":\nonce\n")
    log.show()
    assert capsys.readouterr().out == ""
    assert log.lines() == ["once"]


def test_a_test_that_fails_shows_the_logs_of_its_servers_and_of_shared_ones(tmp_path: Path) -> None:
    file = tmp_path / "test_that_fails.py"
    file.write_text(TEST_THAT_FAILS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(file)]
    quick = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=quick, capture_output=True, text=True, check=False)
    assert "RuntimeError: disconnected" in done.stdout
    assert done.stdout.count("shared closed\n") == done.stdout.count("own closed\n") == 1
