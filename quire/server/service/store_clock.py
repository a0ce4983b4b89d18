"""The time by which kept responses expire."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the first counts while a machine sleeps, too


def _since_boot_ns() -> int:
    return time.clock_gettime_ns(_CLOCK)


def _boot_id() -> str:
    """The same for all processes until the machine starts again; empty where the system does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class Clocks(NamedTuple):
    """The clocks of the machine, in nanoseconds. The wall clock can be set, to any time; the other cannot."""

    wall: Callable[[], int] = time.time_ns
    since_boot: Callable[[], int] = _since_boot_ns
    boot_id: Callable[[], str] = _boot_id


class StoreClock:
    """Goes on evenly, whatever the wall clock is set to, and is one for all processes that share a file until the
    machine starts again. Only then the wall clock is read again, and the time does not go back."""

    def __init__(self, clocks: Clocks, boot_id: str, offset_ns: int) -> None:
        self.boot_id = boot_id
        self.offset_ns = offset_ns
        self._since_boot = clocks.since_boot

    @classmethod
    def begun(cls, clocks: Clocks) -> "StoreClock":
        """A clock that nothing shares yet."""
        return cls(clocks, clocks.boot_id(), clocks.wall() - clocks.since_boot())

    def join(self, boot_id: str, offset_ns: int, latest_ns: int) -> bool:
        """Go by the offset that a file has. False where that is of an earlier start of the machine: then others are to
        go by this one. `latest_ns` is the latest time in the file."""
        if self.boot_id and self.boot_id == boot_id:
            self.offset_ns = offset_ns
            return True
        self.offset_ns += max(0, latest_ns - self.now_ns())
        return False

    def now_ns(self) -> int:
        return self._since_boot() + self.offset_ns
