"""The share of a GPU's memory that JAX takes, as its client is told. Each in a process, since JAX looks once."""

import os
import subprocess
import sys

import pytest

from quire.executor.memory import FRACTION_VARIABLES

TELL = """
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options as options
print(options()["memory_fraction"])
"""
RESERVE = "from quire.executor.memory import reserve_device_memory\nreserve_device_memory(fraction={})"
PLAN = """
from quire.settings.config import Config
from quire.engine.building.plan import plan_deployment
plan_deployment(Config("random:tiny", memory_fraction={}))
"""


def told(code: str, **environment: str) -> float:
    others = {name: value for name, value in os.environ.items() if name not in FRACTION_VARIABLES}
    environment = others | {"JAX_PLATFORMS": "cpu"} | environment
    return float(subprocess.check_output([sys.executable, "-c", code + TELL], env=environment, text=True))


@pytest.mark.parametrize(("asked", "taken"), [(None, 0.94), (0.4, 0.4), (1.0, 0.94), (-1.0, 0.94)])
def test_jax_takes_the_share_of_a_gpu_that_is_asked_for(asked: float | None, taken: float) -> None:
    assert told(RESERVE.format(asked)) == taken


@pytest.mark.parametrize("variable", FRACTION_VARIABLES)
def test_a_variable_of_jax_overrides_it_under_either_name(variable: str) -> None:
    assert told(RESERVE.format(0.4), **{variable: "0.6"}) == 0.6


def test_an_engine_asks_for_its_share_before_there_is_a_device() -> None:
    assert told(PLAN.format(0.3)) == 0.3
