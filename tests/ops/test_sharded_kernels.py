"""Kernels on a mesh of devices give what plain jnp gives on one."""

import subprocess
import sys
from pathlib import Path

from tests.shared_programs import environment


def test_each_device_runs_the_kernels_on_its_own_heads() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.sharded_kernels"],
        env=environment(8),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pallas: ") == done.stdout.count("native: ") == 7


def test_each_device_runs_the_products_of_experts_on_its_own_features() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.sharded_experts"],
        env=environment(8),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("experts: ") == 6
