"""Threads of the native library: one for each processor that the process may use."""

import os
import subprocess
import sys

import pytest

from quire.ops.native import library

SCRIPT = """
import os, sys
from pathlib import Path
import jax, numpy as np
from quire.ops.native import float_product, library
if sys.argv[1]:
    os.sched_setaffinity(0, {int(sys.argv[1])})
assert library.load() and library.need("floats")
rows, weight = np.ones((64, 512), np.float32), np.ones((512, 512), np.float32)
jax.block_until_ready(jax.jit(float_product.product)(rows, weight))
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print(names.count("quire-crew"))
"""
needs_library = pytest.mark.skipif(not library.load(), reason="the native library cannot be built")


def num_helpers(processors: str, core: str = "") -> int:
    variables = {**os.environ, "NPROC": processors}
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, core], env=variables, check=True, capture_output=True, text=True
    )
    return int(found.stdout)


@needs_library
@pytest.mark.parametrize("processors", [1, 4])
def test_a_share_of_the_processors_has_as_many_threads(processors: int):
    assert num_helpers(str(processors)) == processors - 1


@needs_library
def test_a_process_that_may_use_one_core_has_no_helpers():
    assert num_helpers("", core=str(min(os.sched_getaffinity(0)))) == 0
