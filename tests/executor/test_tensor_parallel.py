"""An engine on 2, 4 and 8 devices says what it says on one."""

import os
import subprocess
import sys
from pathlib import Path


def test_tokens_do_not_depend_on_the_number_of_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.executor.tensor_parallel"],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same tokens, ") == 3
    assert "same tokens with adapters" in done.stdout
    assert "same tokens from the host" in done.stdout
    assert "same tokens of recurrent layers" in done.stdout
