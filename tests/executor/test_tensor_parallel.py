"""An engine on 2, 4 and 8 devices says what it says on one."""

import subprocess
import sys
from pathlib import Path

from tests.shared_programs import environment


def test_tokens_do_not_depend_on_the_number_of_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.executor.tensor_parallel"],
        env=environment(8),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same tokens, ") == 3
    assert "same tokens with adapters" in done.stdout
    assert "same tokens from the host" in done.stdout
    assert "same tokens of qwen3_next" in done.stdout
    assert "same tokens of granitemoehybrid" in done.stdout
