"""Options of XLA for tests."""

import os
from pathlib import Path

import jax
import numpy as np

from quire.executor.programs import compiler
from tests.compiling import AS_SERVED, QUICKLY, as_served, flags
from tests.kept_programs import MOST, KeptPrograms
from tests.shared_programs import forget_oldest


def test_flags_that_are_given_stay_and_count() -> None:
    assert [flag.split("=")[0] for flag in flags("").split()] == [f"--{name}" for name in QUICKLY]
    given = "--xla_dump_to=a --xla_backend_optimization_level=2"
    assert flags(given).endswith(given)
    assert flags(given).count("--xla_backend_optimization_level") == 1
    assert flags(flags(given)) == flags(given), "a worker has the flags of the process that started it"


def test_programs_can_be_compiled_as_a_server_compiles_them() -> None:
    before = compiler.cpu_options()
    with as_served():
        assert compiler.cpu_options() == before | AS_SERVED
    assert compiler.cpu_options() == before
    assert QUICKLY.keys() == AS_SERVED.keys()
    assert all(value != QUICKLY[name] for name, value in AS_SERVED.items())


def test_what_jax_keeps_of_many_programs_is_let_go_and_of_few_is_not() -> None:
    traced = []

    @jax.jit
    def add_one(x: jax.Array) -> jax.Array:
        traced.append(x.shape)
        return x + 1

    kept = KeptPrograms()
    kept.begin()
    add_one(np.ones(3))
    assert kept.count > 0
    kept.forget_many()
    add_one(np.ones(3))
    assert len(traced) == 1
    kept.count = MOST + 1
    kept.forget_many()
    add_one(np.ones(3))
    assert len(traced) == 2
    assert kept.count < MOST


def test_the_programs_of_the_oldest_runs_are_forgotten(tmp_path: Path) -> None:
    for age in range(4):
        path = tmp_path / f"{age}"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 - age, 1000 - age))
    forget_oldest(tmp_path, most_bytes=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
