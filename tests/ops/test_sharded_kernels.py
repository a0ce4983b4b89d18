"""Kernels on a mesh of devices give what plain jnp gives on one."""

import os
import subprocess
import sys
from pathlib import Path


def test_each_device_runs_the_kernels_on_its_own_heads() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.sharded_kernels"],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pallas: ") == 24
