"""Tests that failed run once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import MOST

ROOT = Path(__file__).parent.parent
ALWAYS = "def test_it(): assert False\n"
ONCE = """
from pathlib import Path

def test_it():
    seen = Path(__file__).with_suffix(".seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there
"""


def run(folder: Path, *sources: str, options: tuple[str, ...] = ("-n", "2")) -> subprocess.CompletedProcess[str]:
    for number, source in enumerate(sources):
        (folder / f"test_{number}.py").write_text(source)
    command = [sys.executable, "-m", "tests.run", *options, "--rootdir", ".", "-p", "no:cacheprovider"]
    # Of the plugins only the one that is used: the others take seconds of each process to load.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}
    environment = os.environ | plugins | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_one_that_passes_alone_is_named_as_unsteady(tmp_path: Path) -> None:
    ran = run(tmp_path, ONCE, "def test_other(): pass\n")
    assert ran.returncode == 0, ran.stdout
    assert "UNSTEADY: 1 test failed in company and passed alone:" in ran.stdout
    assert "test_0.py::test_it" in ran.stdout.partition("UNSTEADY")[2]


@pytest.mark.parametrize(
    "sources", [(ALWAYS, ONCE), (ONCE,) * (MOST + 1), ("import no_such_module\n",)], ids=["twice", "many", "import"]
)
def test_other_failures_fail_the_run(tmp_path: Path, sources: tuple[str, ...]) -> None:
    ran = run(tmp_path, *sources)
    assert ran.returncode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED), ran.stdout
    assert "UNSTEADY" not in ran.stdout


def test_nothing_runs_twice_where_all_pass(tmp_path: Path) -> None:
    ran = run(tmp_path, "def test_other(): pass\n")
    assert ran.returncode == 0, ran.stdout
    assert "once more" not in ran.stdout


def test_a_run_that_ended_early_fails(tmp_path: Path) -> None:
    ran = run(tmp_path, ONCE, ALWAYS, options=("-n", "0", "-x"))
    assert ran.returncode != 0, ran.stdout
    assert "once more" not in ran.stdout
