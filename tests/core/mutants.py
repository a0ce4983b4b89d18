"""Breaks the core one line at a time and shows that the tests notice.

    python -m tests.core.mutants [--jobs 2] [--only WORD]

Each mutant is one plausible fault in a copy of the package, and the tests of the core and of the engine run against it
until one fails. A mutant that survives is a fault that could be made without anyone noticing; it must be explained
here, or the run fails. No mutant runs while the line of one is not in the source any more: the run names them and
fails.
"""

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

from tests.core.mutant import Mutant, apply, outdated
from tests.core.mutants_of_engine import ENGINE_MUTANTS
from tests.core.mutants_of_exchange import EXCHANGE_MUTANTS
from tests.core.mutants_of_host_tier import HOST_TIER_MUTANTS
from tests.core.mutants_of_pages import PAGE_MUTANTS
from tests.core.mutants_of_replays import REPLAY_MUTANTS
from tests.core.mutants_of_scheduling import SCHEDULING_MUTANTS
from tests.core.mutants_of_snapshots import SNAPSHOT_MUTANTS

# Without shrinking: that a test fails is all there is to know.
settings.register_profile(
    "mutants",
    max_examples=150,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("quire", "tests", "pyproject.toml")
# Those that kill most, fastest, come first.
TESTS = ("tests/core/test_page_pool.py", "tests/core/test_host_pages.py", "tests/core/test_prefix_exchange.py",
         "tests/core/test_scheduler.py", "tests/core/test_turns.py", "tests/core/test_sharing.py",
         "tests/core/test_admission.py", "tests/core/test_bursts.py", "tests/core/test_speculation.py",
         "tests/core/test_lookup.py", "tests/core/test_replays.py",
         "tests/core/test_page_groups.py", "tests/core/test_slot_state.py", "tests/core/test_snapshots.py",
         "tests/core/test_host_tier.py", "tests/core/test_prefix_cache.py", "tests/core/test_prefix_trees.py",
         "tests/test_retry_reservations.py", "tests/core/test_schedules.py", "tests/engine")  # fmt: skip
CPU_S = 120  # of one mutant's tests, which a busy machine does not change; a fault can also make them wait for ever
TIMEOUT_S = 900
MUTANTS = (
    *PAGE_MUTANTS,
    *SNAPSHOT_MUTANTS,
    *HOST_TIER_MUTANTS,
    *EXCHANGE_MUTANTS,
    *SCHEDULING_MUTANTS,
    *REPLAY_MUTANTS,
    *ENGINE_MUTANTS,
)


def pytest_configure() -> None:
    """This module is a plugin of the tests that run against a mutant."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))


def copy_to(folder: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)


def why_not_collected() -> str:
    """What keeps pytest from finding the tests without any fault, which would seem to kill every mutant; or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *TESTS]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stdout + done.stderr


def run(mutant: Mutant) -> tuple[Mutant, str | None, float]:
    """Which test failed, None when none did; and how long that took."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copy_to(copy)
        target = copy / "quire" / mutant.path
        target.write_text(apply(mutant, target.read_text()))
        # python -m puts the working directory first on the path, so that the copy is what is imported.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "--tb=no",
            "-p",
            "tests.core.mutants",
            "-p",
            "no:cacheprovider",
        ]
        command += ["--hypothesis-profile=mutants", "--show-capture=no"]
        command += TESTS if mutant.path.startswith("core") else reversed(TESTS)
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return mutant, f"it did not end in {TIMEOUT_S} s", time.monotonic() - begun
    taken = time.monotonic() - begun
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return mutant, f"it did not end in {CPU_S} s of CPU time", taken
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1) or (done.returncode == 1 and not failed):
        raise RuntimeError(f"{mutant.name}: the tests could not be run\n{done.stdout}\n{done.stderr}")
    return mutant, failed[0].split(" ")[1] if failed else None, taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="only the mutants whose names hold this")
    asked = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if asked.only in mutant.name]
    if lines := outdated(chosen, ROOT / "quire"):
        print(*lines, f"{len(lines)} of {len(chosen)} mutants do not fit the source; mend or remove them", sep="\n")
        return 2
    if not chosen:
        print(f"no mutant has {asked.only!r} in its name")
        return 2
    if reason := why_not_collected():
        print(reason, "the tests cannot be run, even without a fault", sep="\n")
        return 2
    survivors = 0
    with ThreadPoolExecutor(asked.jobs) as workers:
        for mutant, killer, taken in workers.map(run, chosen):
            survivors += killer is None and not mutant.explanation
            verdict = f"killed by {killer}" if killer else f"SURVIVED {mutant.explanation or 'and nobody can say why'}"
            print(f"{mutant.name:<46} {taken:6.1f} s  {verdict}", flush=True)
    print(f"{len(chosen)} mutants, {survivors} unexplained survivors")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
