"""Selects the tests to run, those marked `parity` or `gpu` only when asked for, and makes every run of a test alike:
hypothesis draws the same cases, requests without a seed get the same ones. QUIRE_HYPOTHESIS_PROFILE=long draws others
in every run, QUIRE_TEST_SEEDS=any-word gives requests others.

The processes of a run share the programs of tiny models (`tests.shared_programs`)."""

import os
import random
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.compiling import flags
from tests.kept_programs import KeptPrograms
from tests.patience import WAIT_S
from tests.process_log import unshown
from tests.shared_programs import FOLDER, forget_oldest, kept_folder

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
KEPT = KeptPrograms()
# The tests of a file run in one worker, so that what they share is made once; so do those of this folder.
IN_ONE_WORKER = "executor"
# These begin first: a long one that began last would run alone.
LONGEST = (
    "executor",
    "e2e/test_neighbours.py",
    "ops/test_sharded_kernels.py",
    "models/test_sharded.py",
    "group/test_members_end.py",
    "server/test_loop_time.py",
    "crossings/test_tiny_models.py",
    "chaos",
    "models",
    "ops",
    "group",
    "page_folder",
    "peers",
)
SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "short", max_examples=200, deadline=None, derandomize=True, suppress_health_check=SLOW_IS_FINE
)
settings.register_profile("long", max_examples=10_000, deadline=None, suppress_health_check=SLOW_IS_FINE)
settings.load_profile(os.environ.get("QUIRE_HYPOTHESIS_PROFILE", "short"))


@pytest.hookimpl(tryfirst=True)  # before the hook by which xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("-m")
    apart = [marker for marker in ("parity", "gpu") if marker not in asked]
    left_out = [item for item in items if any(item.get_closest_marker(marker) for marker in apart)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _turn(item.path.relative_to(TESTS).as_posix()))


def _turn(path: str) -> int:
    return next((turn for turn, longest in enumerate(LONGEST) if path.startswith(longest)), len(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadScopeScheduling | None":
    """xdist's own groups do nothing with pytest 9: they are written into names that it no longer reads."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = f"{TESTS.name}/{IN_ONE_WORKER}/"
            return folder if nodeid.startswith(folder) else nodeid.partition("::")[0]

    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # the order is that of the tests
    return ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # with it programs are not kept on a CPU
    os.environ["QUIRE_COMPILE_PROCESSES"] = "0"  # tiny models are compiled before another process has loaded JAX
    if "gpu" not in config.getoption("-m"):
        os.environ["XLA_FLAGS"] = flags(os.environ.get("XLA_FLAGS", ""))  # JAX reads it when it is first used
    if FOLDER not in os.environ:
        folder = kept_folder()
        os.environ[FOLDER] = str(folder)
        config.add_cleanup(lambda: forget_oldest(folder))


def pytest_collection_finish() -> None:
    KEPT.begin()


@pytest.hookimpl(trylast=True)  # after fixtures of the file have ended
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        KEPT.forget_many()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what servers have logged, those too that many tests share."""
    report = yield
    if report.failed:
        report.sections += unshown()
    return report


@pytest.fixture(autouse=True)
def _same_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed draw one by `secrets.randbits`; nothing else does."""
    drawn = random.Random(os.environ.get("QUIRE_TEST_SEEDS", "") + request.node.nodeid)
    monkeypatch.setattr(secrets, "randbits", drawn.getrandbits)


@pytest.fixture
def patient_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No grammar counts as too complex because a busy machine takes its time for a mask."""
    monkeypatch.setattr("quire.engine.grammar_masks.MASKS_WITHIN_S", WAIT_S)
