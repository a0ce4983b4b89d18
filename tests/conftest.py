"""Selects the tests to run, those marked `parity` or `gpu` only when asked for, and makes every run of a test alike:
hypothesis draws the same cases, requests without a seed get the same ones. QUIRE_HYPOTHESIS_PROFILE=long draws others
in every run, QUIRE_TEST_SEEDS=any-word gives requests others."""

import os
import random
import secrets
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Folders whose tests stay in one worker: each worker would compile the models again, and use all cores.
IN_ONE_WORKER = ("executor", "e2e")
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
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            folder = item.path.relative_to(Path(__file__).parent).parts[0]
            if folder in IN_ONE_WORKER:
                item.add_marker(pytest.mark.xdist_group(folder))


@pytest.fixture(autouse=True)
def _same_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed draw one by `secrets.randbits`; nothing else does."""
    drawn = random.Random(os.environ.get("QUIRE_TEST_SEEDS", "") + request.node.nodeid)
    monkeypatch.setattr(secrets, "randbits", drawn.getrandbits)
