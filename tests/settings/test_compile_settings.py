"""The number of processes that compile for an engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.building.compiling import prepare_processes
from quire.executor.programs.store import ProgramStore
from quire.settings.config import Config
from quire.settings.resolve import resolve_compile_processes

GIB = 2**30


@pytest.mark.parametrize(
    ("threads", "outside_gib", "value"),
    [(16, 8.3, 4), (16, 4.7, 3), (16, 2.9, 1), (16, 1.4, 0), (8, 8.3, 2), (2, 8.3, 1), (16, 0, 0)],
)
def test_a_gpu_has_as_many_as_its_threads_and_the_memory_beside_jax_allow(
    threads: int, outside_gib: float, value: int
) -> None:
    choice = resolve_compile_processes(Config(), "gpu", threads, int(outside_gib * GIB))
    assert choice.value == value
    assert choice.is_automatic


def test_a_cpu_has_one_unless_others_are_asked_for() -> None:
    assert resolve_compile_processes(Config(), "cpu", 16, 0).value == 1
    assert resolve_compile_processes(Config(), "cpu", 1, 0).value == 0
    assert resolve_compile_processes(Config(compile_processes=0), "cpu", 16, 0).value == 0
    assert resolve_compile_processes(Config(compile_processes=2), "cpu", 16, 0).value == 2


def test_several_devices_have_none() -> None:
    assert resolve_compile_processes(Config(tensor_parallel=2), "gpu", 16, 8 * GIB).value == 0
    assert resolve_compile_processes(Config(tensor_parallel=2, compile_processes=0), "gpu", 16, 0).value == 0


@pytest.mark.parametrize(
    ("platform", "is_served", "asked", "has_some"),
    [
        ("cpu", True, None, True),
        ("cpu", False, None, False),  # its caller would wait for a process of a low priority
        ("cpu", False, 1, True),
        ("gpu", False, None, True),
    ],
)
def test_an_engine_of_a_cpu_that_does_not_serve_has_none_by_default(
    platform: str, is_served: bool, asked: int | None, has_some: bool, tmp_path: Path
) -> None:
    deployment: Any = SimpleNamespace(
        resolved=SimpleNamespace(compile_processes=1),
        facts=SimpleNamespace(platform=platform),
        config=Config(compile_processes=asked),
        is_served=is_served,
    )
    processes = prepare_processes(deployment, ProgramStore(tmp_path, "a model"))
    assert (processes is not None) == has_some
    if processes is not None:
        assert processes.process_ids == []  # none begins before there is something to do
        processes.close()
