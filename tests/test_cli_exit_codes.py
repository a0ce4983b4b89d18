"""Exit codes, as docs/operations/running.md has them, and one line that says why."""

import socket
import subprocess
import sys

import pytest

from tests.patience import WAIT_S

BUSY = "PORT"  # stands for a port that is taken


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
        (["serve", "--port", "0", "--chat-template", "/no/such"], 1, "/no/such: cannot be read: No such file"),
        (["serve", "--port", "0", "--max-input-tokens", "9999999"], 2, "max_input_tokens is 9999999; it must be"),
    ],
    ids=["busy port", "foreign address", "impossible port", "two models", "two models, TGI", "missing model",
         "wrong setting", "no template", "input"],
)  # fmt: skip
def test_a_failure_is_one_line_and_an_exit_code(arguments: list[str], code: int, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "quire", *(part.replace(BUSY, port) for part in arguments)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.stderr.splitlines()[-1].startswith(f"quire: {message.replace(BUSY, port)}")
    assert "Traceback" not in ended.stderr
    assert ended.returncode == code
