"""The workflows run commands that there are, on the versions of Python that the package names."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import quire

ROOT = Path(__file__).parents[1]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def commands() -> list[str]:
    jobs: list[dict[str, Any]] = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
    return [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]


def test_they_run_targets_and_files_that_there_are():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {word for command in commands() for word in re.findall(r"^make ([a-z-]+)", command)}
    assert {"lint", "test", "test-parity", "docs", "test-dist"} <= asked <= targets
    files = {name for command in commands() for name in re.findall(r"[\w./-]+\.(?:py|sh)\b", command)}
    assert files
    assert all((ROOT / name).is_file() for name in files)


def test_tests_run_on_every_version_of_python_that_the_package_names():
    run = WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    stem = "Programming Language :: Python :: 3."
    assert [f"{stem}{version.removeprefix('3.')}" for version in run] == [
        name for name in PROJECT["classifiers"] if name.startswith(stem)
    ]
    assert PROJECT["requires-python"] == f">={run[0]}"


@pytest.mark.parametrize(
    ("tag", "problem"),
    [(f"v{quire.__version__}", ""), (quire.__version__, "it must be v"), ("v99.0.0", "it must be v")],
)
def test_a_tag_is_released_only_as_the_version_that_the_changelog_has(tag: str, problem: str):
    check = ROOT / ".github/check_version.py"
    done = subprocess.run([sys.executable, check, tag], capture_output=True, text=True, check=False)
    assert problem in done.stderr
    assert (done.returncode == 0) == (not problem)


def test_the_image_installs_what_the_package_and_its_extras_need_before_the_code_is_copied():
    dependencies = ROOT / "deploy/dependencies.py"
    done = subprocess.run(
        [sys.executable, dependencies, "otel"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert set(PROJECT["dependencies"]) | set(PROJECT["optional-dependencies"]["otel"]) <= set(done)
    layers = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert layers.index("dependencies.txt") < layers.index("COPY quire")
    unknown = subprocess.run(
        [sys.executable, dependencies, "cude"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "EXTRAS has 'cude'; there are cuda, otel" in unknown.stderr
