"""`make test-clients`: every client's tests, each in its own environment, against one server of the default model.

It writes docs/clients.md from the last results of each client: `make test-clients ARGS="openai litellm"` renews theirs.
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

from tests.clients.environments import CLIENTS, Client, install, is_possible, versions
from tests.clients.results import read_results, write_page
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
        if is_possible(client):
            install(client, report)
        else:
            report(f"{client.name} is left out: there is no npm")
    chosen = [client for client in chosen if is_possible(client)]
    with serving() as url:
        for client in chosen:
            run(client, url)
    results = [read_results(client, versions(client)) for client in CLIENTS if client.record.is_file()]
    if len(results) == len(CLIENTS):
        PAGE.write_text(write_page(results))
        report(f"wrote {PAGE.relative_to(ROOT)}")
    if failed := [result.client.name for result in results if result.failed and result.client in chosen]:
        sys.exit(f"failed: {', '.join(failed)}")


@contextmanager
def serving() -> Iterator[str]:
    """A server of the default model. It may take its time: the first start fetches the model and compiles."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "quire", "serve", MODEL, "--port", str(port), "--api-key", KEY]
    with tempfile.TemporaryFile("w+") as log:
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


def run(client: Client, url: str) -> None:
    report(f"testing {client.name}")
    client.record.unlink(missing_ok=True)
    # The settings and fixtures of Quire's own tests need Quire, which is not in this environment.
    options = ["-c", os.devnull, "--rootdir", client.test_file.parent, "--confcutdir", client.test_file.parent]
    others = ["-p", "no:cacheprovider", "--import-mode=importlib", "-W", "ignore", "--junit-xml", client.record]
    server = {"QUIRE_CLIENTS_URL": url, "QUIRE_CLIENTS_KEY": KEY, "QUIRE_CLIENTS_MODEL": MODEL}
    subprocess.run(
        [client.python, "-m", "pytest", "-q", "--tb=short", *options, *others, client.test_file],
        cwd=ROOT, env=os.environ | server, check=False,
    )  # fmt: skip
    if not client.record.is_file():
        sys.exit(f"the tests of {client.name} ended before their results were written")


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
