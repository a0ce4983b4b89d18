"""`make test-clients`: every client's tests, each in its own environment, against one server of the default model.

A run of all clients writes docs/clients.md; one of some, `make test-clients ARGS="openai litellm"`, does not.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.clients.environments import CLIENTS, Client, install
from tests.clients.results import Result, read_results, write_page
from tests.server.processes import free_port

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "clients.md"
KEY = "a-key-of-the-tests"
MODEL = "smollm2-135m-instruct"


def main() -> None:
    names = sys.argv[1:]
    if unknown := set(names) - {client.name for client in CLIENTS}:
        sys.exit(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CLIENTS)}")
    chosen = [client for client in CLIENTS if not names or client.name in names]
    for client in chosen:
        install(client, report)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url:
        results = [run(client, url, Path(folder)) for client in chosen]
    if not names:
        PAGE.write_text(write_page(results))
        report(f"wrote {PAGE.relative_to(ROOT)}")
    if failed := [result.client.name for result in results if result.failed]:
        sys.exit(f"failed: {', '.join(failed)}")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A server of the default model. It may take its time: the first start fetches the model and compiles."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "quire", "serve", MODEL, "--port", str(port), "--api-key", KEY]
    with (folder / "server.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            while not answers(url):
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(f"the server did not start:\n{log.read()}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.HTTPError:
        return False


def run(client: Client, url: str, folder: Path) -> Result:
    report(f"testing {client.name}")
    record = folder / f"{client.name}.xml"
    # The settings and fixtures of Quire's own tests need Quire, which is not in this environment.
    options = ["-c", os.devnull, "--rootdir", client.test_file.parent, "--confcutdir", client.test_file.parent]
    others = ["-p", "no:cacheprovider", "--import-mode=importlib", "-W", "ignore"]
    server = {"QUIRE_CLIENTS_URL": url, "QUIRE_CLIENTS_KEY": KEY, "QUIRE_CLIENTS_MODEL": MODEL}
    subprocess.run(
        [client.python, "-m", "pytest", "-q", "--tb=short", *options, *others, "--junit-xml", record, client.test_file],
        cwd=ROOT, env=os.environ | server, check=False,
    )  # fmt: skip
    return read_results(client, record)


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
