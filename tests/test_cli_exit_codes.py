"""Exit codes, as docs/operations/running.md has them, and one line that says why."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import WAIT_S

BUSY = "PORT"  # stands for a port that is taken
TOO_MANY = "max_batch_size is 1000000; it must be at most 16384"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["serve", "random:tiny", "--port", BUSY], 1, "cannot listen on 127.0.0.1 port PORT: Address already in use"),
        (["serve", "random:tiny", "--host", "192.0.2.1"], 2, "cannot listen on 192.0.2.1 port 8000: Cannot assign"),
        (["serve", "random:tiny", "--port", "70000"], 2, "port is 70000; it must be between 0 and 65535"),
        (["serve", "a", "--model", "b"], 2, "MODEL is a and model is b; they mean the same"),
        (["serve", "a", "--model-id", "b"], 2, "MODEL is a and model_id is b; they mean the same"),
        (["generate", "hello", "--model", "no/such/model"], 1, "'no/such/model': no such file or folder"),
        (["doctor", "--model", "random:tiny", "--quantize", "int3"], 2, "quantize is 'int3'; it can be"),
        (["doctor", "--model", "random:tiny", "--max-batch-size", "1000000"], 2, TOO_MANY),
        (["serve", "--port", "0", "--max-batch-size", "1000000"], 2, TOO_MANY),
        (["serve", "--port", "0", "--chat-template", "/no/such"], 1, "/no/such: cannot be read: No such file"),
        (["serve", "--port", "0", "--max-input-tokens", "9999999"], 2, "max_input_tokens is 9999999; it must be"),
    ],
    ids=["busy port", "foreign address", "impossible port", "two models", "two models, TGI", "missing model",
         "wrong setting", "too many slots", "too many slots to serve", "no template", "input"],
)  # fmt: skip
def test_a_failure_is_one_line_and_an_exit_code(arguments: list[str], code: int, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "quire", *(part.replace(BUSY, port) for part in arguments)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.stderr.splitlines()[-1].startswith(f"quire: {message.replace(BUSY, port)}")
    assert "Traceback" not in ended.stderr
    assert ended.returncode == code


STREAMS = """
import os, sys
from quire.cli import main
try:
    main(["--version"])
except SystemExit as ended:
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    with open(sys.argv[1], "w") as report:
        print(ended.code, *streams, repr(sys.stdin.read()), file=report)
"""


def test_closed_standard_streams_are_opened_on_nothing(tmp_path: Path) -> None:
    """Their numbers would go to the next files, to which libraries would print."""
    report = tmp_path / "report"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    subprocess.run([*closed, sys.executable, "-c", STREAMS, str(report)], timeout=WAIT_S, check=False)
    assert report.read_text() == "0 /dev/null /dev/null /dev/null ''\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--model", "random:tiny"],
        ["bench", "offline", "--help"],
        ["--version"],
    ],
    ids=["report", "help", "version"],
)
def test_a_full_standard_output_is_one_line_and_a_failure(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "quire", *arguments]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False)
    assert ended.stderr == "quire: standard output cannot be written: No space left on device\n"
    assert ended.returncode == 1


def test_a_large_text_that_is_not_buffered_fails_in_the_same_way(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import quire.cli as cli\ncli._run = lambda asked, given: print('x' * 99999)\ncli.main([])")
    with open("/dev/full", "w") as full:
        command = [sys.executable, str(program)]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False)
    assert ended.stderr == "quire: standard output cannot be written: No space left on device\n"
    assert ended.returncode == 1


def test_a_reader_that_is_gone_ends_it_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        command = [sys.executable, "-m", "quire", "doctor", "--model", "random:tiny"]
        ended = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False)
    assert (ended.stderr, ended.returncode) == ("", 1)
