"""The devices of each of several engines on one machine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import InvalidSetting
from quire.settings.machine import limit_threads

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class EngineDevices:
    """The part of the machine that one engine process may use: some of its GPUs, or some of its cores."""

    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them; none on a machine without
    cores: tuple[int, ...] = ()  # empty: all
    num_engines: int = 1  # those of the server, which share the memory and the processors that a container allows

    def apply(self) -> None:
        """Restrict this process. Called before JAX looks for devices."""
        limit_threads(self.num_engines)
        if self.gpus:
            os.environ[VISIBLE] = ",".join(self.gpus)
        elif self.cores:
            for thread in (0, os.getpid()):  # this thread and the first one: new threads have the cores of their makers
                os.sched_setaffinity(thread, self.cores)  # XLA has a thread for each core that it may use


def divide_devices(
    num_engines: int, per_engine: int, gpus: tuple[str, ...], cores: tuple[int, ...]
) -> list[EngineDevices]:
    """`per_engine` GPUs for each engine in their order; without GPUs, as many cores for each engine as for the others.

    Engines with other numbers of threads could add numbers in another order. Where there are fewer cores than engines
    all share all of them.
    """
    if not gpus:
        share = len(cores) // num_engines
        shares = [cores[number * share : (number + 1) * share] for number in range(num_engines)]
        return [EngineDevices(cores=part, num_engines=num_engines) for part in shares]
    needed = num_engines * per_engine
    if needed > len(gpus):
        several = f" with tensor_parallel {per_engine}" if per_engine > 1 else ""
        raise InvalidSetting(
            f"data_parallel is {num_engines}{several}, which needs {needed} GPUs; there are {len(gpus)}"
        )
    parts = [gpus[number * per_engine : (number + 1) * per_engine] for number in range(num_engines)]
    return [EngineDevices(gpus=part, num_engines=num_engines) for part in parts]


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that JAX would use in this process, without loading it: those that are allowed, or all there are."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & {name.strip() for name in platforms.split(",")}:
        return ()
    found = sorted(int(path.name[6:]) for path in devices.glob("nvidia*") if path.name[6:].isdecimal())
    if not found:
        return ()
    if VISIBLE not in environ:
        return tuple(str(number) for number in range(len(found)))
    allowed: list[str] = []
    for name in (part.strip() for part in environ[VISIBLE].split(",")):
        if not name or name.startswith("-"):  # CUDA ignores these and all that follow
            break
        allowed.append(name)
    return tuple(allowed)


def visible_cores() -> tuple[int, ...]:
    """The cores that this process may use; none where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
