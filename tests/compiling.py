"""Options of XLA for tests. Tiny models run for less time than they take to compile, so most tests do without most
optimisations; those of the default model, and of bits that must not depend on neighbours, compile as a server does."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

# A process with a flag that its XLA does not know ends at once; newer ones than this do without the last two flags.
IS_KNOWN_XLA = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
# A small program is not worth cutting into parts that are compiled in parallel.
QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True} | (
    {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1} if IS_KNOWN_XLA else {}
)
# XLA's own, which a server does not change.
AS_SERVED: dict[str, Any] = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False} | (
    {"xla_cpu_use_fusion_emitters": True, "xla_cpu_parallel_codegen_split_count": 32} if IS_KNOWN_XLA else {}
)


def flags(given: str) -> str:
    """XLA_FLAGS by which a process and its children compile quickly; those that are given count."""
    quickly = {name: f"--{name}={str(value).lower()}" for name, value in QUICKLY.items()}
    return " ".join([*(flag for name, flag in quickly.items() if f"--{name}=" not in given), given]).strip()


@contextmanager
def as_served() -> Iterator[None]:
    """Programs of executors are compiled as a server compiles them."""
    from quire.executor.programs import compiler

    options = compiler.cpu_options() | AS_SERVED
    with patch.object(compiler, "cpu_options", lambda: options):
        yield
