"""Decides how many processes compile programs for an engine."""

from quire.errors import InvalidSetting
from quire.settings.choice import Choice, chosen
from quire.settings.config import Config

# Of a GPU's memory that is not JAX's: for the engine's programs and its driver, and for a process that compiles.
ENGINE_BYTES, PROCESS_BYTES = 2048 * 2**20, 768 * 2**20
MAX_PROCESSES = 4
THREADS_OF_ONE = 4  # a process traces one program at a time, and compiles several


def resolve_compile_processes(config: Config, platform: str, threads: int, outside_bytes: int) -> Choice[int]:
    """`outside_bytes`: of a GPU, that are not JAX's."""
    name, asked = "compile_processes", config.compile_processes
    if config.tensor_parallel > 1:
        if asked:
            raise InvalidSetting(f"{name} is {asked}; with tensor_parallel = {config.tensor_parallel} it must be 0")
        return chosen(name, asked, 0, "several devices: threads compile")
    if platform != "gpu":
        count = int(platform == "cpu" and threads > 1)
        reason = "one, of a low priority, while an engine serves" if count else "threads compile"
        return chosen(name, asked, count, f"{platform.upper()} default: {reason}")
    fitting = max(0, outside_bytes - ENGINE_BYTES) // PROCESS_BYTES
    reason = f"one for {THREADS_OF_ONE} compile_threads; {outside_bytes / 2**30:.1f} GiB of the GPU are not JAX's"
    return chosen(name, asked, min(max(1, threads // THREADS_OF_ONE), MAX_PROCESSES, fitting), reason)
