"""The memory and the processors that this process may use: those of the machine, or less in a container."""

import os
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/")


def memory_bytes(system: Path = SYSTEM) -> int:
    """The memory of the machine, or the least limit of the control groups that this process is in."""
    limits = [physical_memory_bytes()]
    for folder in _control_groups("memory", system):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limits += [int(text) for text in _words(folder / name) if text.isdecimal()]
    return min(limits)


def num_processors(system: Path = SYSTEM, visible: int | None = None) -> int:
    """The `visible` processors, or the share of them that the control groups of this process allow, rounded down:
    threads beyond the share would be stopped for the rest of each period, in the middle of a step."""
    shares = [float(visible or num_visible_processors())]
    for folder in _control_groups("cpu", system):
        names = ("cpu.max",) if (folder / "cpu.max").exists() else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        numbers = [int(text) for name in names for text in _words(folder / name) if text.isdecimal()]
        if len(numbers) == 2 and numbers[1]:  # "max" and -1 are no limits
            shares.append(numbers[0] / numbers[1])
    return max(1, int(min(shares)))


def physical_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_visible_processors() -> int:
    """Processors that this process may run on, whatever share of their time it has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_threads(num_engines: int = 1, system: Path = SYSTEM) -> None:
    """Give XLA and the native library a thread for each processor that the container allows, where it allows fewer than
    there are. Call it before JAX has looked for devices. NPROC is XLA's variable; if it is set already, it holds."""
    allowed = num_processors(system)
    if allowed < num_visible_processors():
        os.environ.setdefault("NPROC", str(max(1, allowed // num_engines)))


def container_limits() -> str | None:
    """The limits below the machine's own, in words; None if there are none."""
    memory, processors = memory_bytes(), num_processors()
    physical, visible = physical_memory_bytes(), num_visible_processors()
    limits = [f"{memory / 2**30:.1f} of {physical / 2**30:.1f} GiB of memory"] if memory < physical else []
    limits += [f"{processors} of {visible} processors"] if processors < visible else []
    return " and ".join(limits) or None


def _control_groups(controller: str, system: Path) -> Iterator[Path]:
    """Folders of the control groups that this process is in, from its own to the outermost that it can see."""
    mounts = [*_mounts(controller, system)]
    for line in _lines(system / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        for is_unified, root, mount in mounts:
            if controllers != "" if is_unified else controller not in controllers.split(","):
                continue
            folder = mount / os.path.relpath(group, root)
            if ".." in group or not Path(group).is_relative_to(root) or not folder.is_dir():
                folder = mount  # the group has another name outside of the container
            yield from (level for level in (folder, *folder.parents) if level.is_relative_to(mount))


def _mounts(controller: str, system: Path) -> Iterator[tuple[bool, str, Path]]:
    """The mounts of a controller's groups: whether of the second version, the group at the top, and the folder."""
    for line in _lines(system / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        (root, mount), (kind, _, options) = before.split(" ")[3:5], after.split(" ")[:3]  # the source may be empty
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            yield kind == "cgroup2", root, system / mount.replace("\\040", " ").lstrip("/")


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    """None of a file that is not there or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
