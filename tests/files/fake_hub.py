"""A hub on this machine: enough of its HTTP interface for the real client to fetch a repository."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories by id, each files by path. `gated` ones ask for `token`; `downloads` lists what was fetched."""

    repositories: dict[str, dict[str, bytes]]
    gated: frozenset[str] = frozenset()
    token: str = "secret"
    downloads: list[str] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[str]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path).strip("/").removeprefix("api/models/")
        for repository, files in self.repositories.items():
            if path != repository and not path.startswith(repository + "/"):
                continue
            rest = path.removeprefix(repository).strip("/")
            if repository in self.gated and handler.headers.get("Authorization") != f"Bearer {self.token}":
                return self.error(handler, 401, "GatedRepo")
            kind, _, what = rest.partition("/")
            revision, _, file_name = what.partition("/")
            if revision not in ("", "main", COMMIT):
                return self.error(handler, 404, "RevisionNotFound")
            if kind in ("", "revision"):
                siblings = [{"rfilename": name} for name in files]
                return self.json(handler, {"id": repository, "sha": COMMIT, "siblings": siblings})
            if kind == "tree":
                entries = [
                    {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
                    for name, content in files.items()
                ]
                return self.json(handler, entries)
            if kind == "resolve" and file_name in files:
                if handler.command == "GET":
                    self.downloads.append(file_name)
                return self.send(handler, 200, files[file_name], {"ETag": f'"{_oid(files[file_name])}"'})
            return self.error(handler, 404, "EntryNotFound")
        return self.error(handler, 404, "RepoNotFound")

    def json(self, handler: BaseHTTPRequestHandler, value: object) -> None:
        self.send(handler, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def error(self, handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self.send(handler, status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def send(self, handler: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str]) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.send_header("X-Repo-Commit", COMMIT)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
