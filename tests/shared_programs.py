"""Compiled programs that the processes of a run of the tests share, and the next run too: compiling is most of what
tests of models and executors do.

JAX keeps them, and finds a program again by all that it follows from, JAX's version and flags among that. The folder is
that of QUIRE_TEST_PROGRAMS, or one in the user's cache; it may be deleted at any time. Not for programs that go into
Quire's own store: XLA does not write those whole that it has read.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.ops.native.processor import instruction_set
from tests.compiling import flags

FOLDER = "TESTS_OF_QUIRE_PROGRAMS"  # a variable that names the folder, set by conftest.py
MOST_BYTES = 1 << 30


def kept_folder() -> Path:
    """Code for one processor does not run on each other."""
    named = os.environ.get("QUIRE_TEST_PROGRAMS")
    root = Path(named) if named else Path.home() / ".cache/quire-tests"
    folder = root / hashlib.sha256(instruction_set().encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written
        return Path(tempfile.mkdtemp(prefix="quire-programs-"))
    return folder


def forget_oldest(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Other runs may use the folder meanwhile: they compile what they do not find."""
    kept = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            kept.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    num_bytes = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if num_bytes <= most_bytes:
            return
        Path(path).unlink(missing_ok=True)
        num_bytes -= size


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
