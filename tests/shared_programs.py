"""Compiled programs that the processes of one run of the tests share, in a folder that is deleted after it.

JAX keeps them: it finds a program again by all that it follows from. Not for programs that go into Quire's own store:
XLA does not write those whole that it has read.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.compiling import flags

FOLDER = "TESTS_OF_QUIRE_PROGRAMS"  # a variable that names the folder, set by conftest.py


def environment(num_devices: int) -> dict[str, str]:
    """For a process that shares all its programs, and compiles them quickly, for so many devices."""
    its_flags = flags(f"--xla_force_host_platform_device_count={num_devices}")
    how = {"JAX_COMPILATION_CACHE_DIR": os.environ[FOLDER], "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**os.environ, **how, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": its_flags}


def printed_by(module: str, *arguments: str, num_devices: int) -> str:
    """What a module prints in a process of its own that has so many devices. It must end with 0."""
    command = [sys.executable, "-m", module, *arguments]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment(num_devices), cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def shared() -> Iterator[None]:
    """This process shares what it compiles meanwhile."""
    import jax

    how = {"jax_compilation_cache_dir": os.environ[FOLDER], "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in how}
    _configure(how)
    try:
        yield
    finally:
        _configure(before)


def _configure(values: dict[str, Any]) -> None:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it reads them once
