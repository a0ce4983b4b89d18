"""`make test-dist`: a wheel in an environment of its own serves without a compiler, from the library that it brings.

python -m tests.dist.run dist/quire-*.whl
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tests.patience import WAIT_S

PORT = 18961
COMPILERS = re.compile(r"(.*-)?(g\+\+|clang\+\+|c\+\+|gcc|clang|cc)(-[\d.]+)?")


def completion() -> str | None:
    """The server's answer, or None while it starts."""
    body = json.dumps({"prompt": "The sky is", "max_tokens": 4}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    except OSError:
        return None


def programs_without_compilers(folder: Path) -> Path:
    """A folder of links to every program on the path but compilers."""
    for place in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in sorted(place.iterdir()) if place.is_dir() else ():
            link = folder / program.name
            if not COMPILERS.fullmatch(program.name) and not link.is_symlink():
                link.symlink_to(program)
    assert not any(shutil.which(name, path=str(folder)) for name in ("g++", "clang++", "c++"))
    return folder


def serve(quire: Path, environment: dict[str, str], folder: Path) -> str:
    """The first answer of a server; returns its log."""
    with (folder / "log").open("w") as log:
        command = [str(quire), "serve", "--port", str(PORT), "--cache-dir", str(folder)]  # the default model
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            begun = time.monotonic()
            while (text := completion()) is None:
                if running.poll() is not None or time.monotonic() - begun > WAIT_S:
                    raise SystemExit(f"it does not serve:\n{(folder / 'log').read_text()}")
                time.sleep(0.1)
        finally:
            running.terminate()
            running.wait()
    print(f"the server answers: {text!r}")
    return (folder / "log").read_text()


def main(wheel: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        binaries = folder / "venv" / "bin"
        print(f"installing {wheel} and what it depends on", flush=True)
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([str(binaries / "pip"), "install", "-q", wheel], check=True, env=outside)
        (folder / "bin").mkdir()
        environment = {**outside, "PATH": str(programs_without_compilers(folder / "bin"))}
        quire = binaries / "quire"
        told = subprocess.run(
            [str(quire), "doctor", "--json", "--cache-dir", str(folder)],
            env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip
        described = json.loads(told)["fit"]["native library"]
        print(f"doctor: {described}")
        assert described.startswith("built ahead for "), described
        assert str(folder / "venv") in described, "the library is the wheel's"
        log = serve(quire, environment, folder)
        assert f"native library: {described}" in log, log
        assert not (folder / "native").exists(), "nothing was built"
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
