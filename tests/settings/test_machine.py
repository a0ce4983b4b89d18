"""The limits of containers, read from trees of files as Linux shows them."""

import os
from pathlib import Path

import pytest

from quire.settings.machine import (
    limit_threads,
    memory_bytes,
    num_processors,
    num_visible_processors,
    physical_memory_bytes,
)

UNIFIED = "35 24 0:31 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
FIRST = "{number} 24 0:{number} {root} /sys/fs/cgroup/{name} rw,relatime shared:9 - cgroup cgroup rw,{name}"
GIB = 2**30


def system(folder: Path, groups: str, mounts: list[str], files: dict[str, str]) -> Path:
    """A root folder with these control groups, mounts and files."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    (folder / "proc/self/mountinfo").write_text("".join(f"{one}\n" for one in mounts))
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


def unified(folder: Path, files: dict[str, str], group: str = "/", root: str = "/") -> Path:
    return system(folder, f"0::{group}\n", [UNIFIED.format(root=root)], files)


def first(folder: Path, files: dict[str, str], group: str, root: str) -> Path:
    groups = f"4:memory:{group}\n1:cpu:{group}\n0::/\n"
    mounts = [FIRST.format(number=number, name=name, root=root) for number, name in ((33, "cpu"), (35, "memory"))]
    return system(folder, groups, mounts, files)


def test_a_machine_without_limits_is_used_whole(tmp_path: Path):
    none = unified(tmp_path, {"memory.max": "max", "memory.high": "max", "cpu.max": "max 100000"})
    for folder in (none, tmp_path / "without proc"):
        assert (
            memory_bytes(folder) == physical_memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )
        assert num_processors(folder) == num_visible_processors() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "processors"),
    [("max 100000", 64), ("9900000 100000", 64), ("400000 100000", 4), ("350000 100000", 3), ("50000 100000", 1)],
)
def test_a_container_has_the_limits_at_its_root(tmp_path: Path, quota: str, processors: int):
    folder = unified(tmp_path, {"memory.max": str(GIB), "memory.high": "max", "cpu.max": quota})
    assert (memory_bytes(folder), num_processors(folder, visible=64)) == (GIB, processors)


def test_the_least_limit_of_all_groups_around_a_process_holds(tmp_path: Path):
    files = {"a/memory.max": str(2 * GIB), "a/b/memory.max": "max", "a/b/c/memory.max": str(3 * GIB)}
    assert memory_bytes(unified(tmp_path, files, group="/a/b/c")) == 2 * GIB


def test_memory_beyond_which_a_group_is_slowed_is_a_limit_too(tmp_path: Path):
    assert memory_bytes(unified(tmp_path, {"memory.max": str(2 * GIB), "memory.high": str(GIB)})) == GIB


def test_groups_beside_the_process_do_not_count(tmp_path: Path):
    files = {"a/memory.max": "max", "b/memory.max": str(GIB), "a/inner/memory.max": str(GIB)}
    assert memory_bytes(unified(tmp_path, files, group="/a")) == physical_memory_bytes()


@pytest.mark.parametrize("group", ["/../../pod/of/another", "/docker/0123"])
def test_groups_that_are_named_from_outside_are_found_at_the_root(tmp_path: Path, group: str):
    assert memory_bytes(unified(tmp_path, {"memory.max": str(GIB)}, group)) == GIB


def test_the_first_version_of_control_groups_has_limits_by_controller(tmp_path: Path):
    files = {
        "memory/memory.limit_in_bytes": str(GIB),
        "cpu/cpu.cfs_quota_us": "100000",
        "cpu/cpu.cfs_period_us": "100000",
    }
    folder = first(tmp_path, files, group="/docker/0123", root="/docker/0123")
    assert (memory_bytes(folder), num_processors(folder)) == (GIB, 1)


def test_the_first_version_without_limits_has_large_numbers(tmp_path: Path):
    files = {
        "memory/app/memory.limit_in_bytes": "9223372036854771712",
        "cpu/app/cpu.cfs_quota_us": "-1",
        "cpu/app/cpu.cfs_period_us": "100000",
    }
    folder = first(tmp_path, files, group="/app", root="/")
    assert (memory_bytes(folder), num_processors(folder)) == (physical_memory_bytes(), num_visible_processors())


def test_mounts_without_a_source_or_with_other_bytes_in_their_names_are_passed_over(tmp_path: Path):
    odd = ["30 24 0:30 / /tmp rw - tmpfs  rw", "31 24 0:31 / /tmp/\udcff rw - tmpfs none rw"]
    folder = unified(tmp_path, {"memory.max": str(GIB)})
    mounts = folder / "proc/self/mountinfo"
    text = "\n".join([*odd, mounts.read_text()])
    mounts.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert memory_bytes(folder) == GIB


@pytest.mark.parametrize("quota", ["100000 0", "", "100000", "none 100000"])
def test_a_quota_that_is_none_is_passed_over(tmp_path: Path, quota: str):
    assert num_processors(unified(tmp_path, {"cpu.max": quota}), visible=64) == 64


def test_folders_with_spaces_are_found(tmp_path: Path):
    mounts = [UNIFIED.format(root="/").replace("/sys/fs/cgroup ", "/sys/fs/cgroup/my\\040groups ")]
    files = {"my groups/memory.max": str(GIB)}
    assert memory_bytes(system(tmp_path, "0::/\n", mounts, files)) == GIB


def test_threads_are_limited_where_processors_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NPROC", raising=False)
    limit_threads(system=unified(tmp_path / "whole", {"cpu.max": "max 100000"}))
    assert "NPROC" not in os.environ
    half = unified(tmp_path / "half", {"cpu.max": "50000 100000"})
    limit_threads(system=half)
    assert os.environ.get("NPROC") == ("1" if num_visible_processors() > 1 else None)
    monkeypatch.setenv("NPROC", "7")  # given by the user
    limit_threads(system=half)
    assert os.environ["NPROC"] == "7"
