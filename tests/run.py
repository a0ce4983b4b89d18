"""Runs tests as pytest does, and the few that failed once more, alone: python -m tests.run [pytest's arguments]

Tests of processes share the machine with everything else on it. One that fails in company and passes alone is printed
at the end as unsteady, with both results: it is a fault to mend, of the test or of the program, and not one of the
change that was tested. One that fails twice fails the run, and so do more than a few failures at once.
"""

import subprocess
import sys

import pytest

MOST = 4  # failures that may be unsteady


class Failures:
    """The tests that failed, in any of their phases, by name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_others = 0  # files that could not be collected
        self.ended_early = False  # as with -x

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.ended_early = bool(session.shouldfail or session.shouldstop)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.names:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.num_others += report.failed


def main(arguments: list[str]) -> int:
    failures = Failures()
    status = int(pytest.main(arguments, plugins=[failures]))
    names = failures.names
    is_whole = status == pytest.ExitCode.TESTS_FAILED and not failures.num_others and not failures.ended_early
    if not is_whole or not 0 < len(names) <= MOST:
        return status
    print(f"\n{_counted(names)} failed; once more, alone:", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", *_marked(arguments), *names], check=False)
    if again.returncode == 0:
        print(f"\nUNSTEADY: {_counted(names)} failed in company and passed alone:", *names, sep="\n  ", flush=True)
    return again.returncode


def _counted(names: list[str]) -> str:
    return f"{len(names)} test{'s' * (len(names) > 1)}"


def _marked(arguments: list[str]) -> list[str]:
    """The choice of marks among pytest's arguments, without which it leaves tests out."""
    return ["-m", arguments[arguments.index("-m") + 1]] if "-m" in arguments else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
