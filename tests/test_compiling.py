"""Options of XLA for tests."""

from quire.executor import compiler
from tests.compiling import AS_SERVED, QUICKLY, as_served, flags


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
