"""The requests that documents show as curl sends them."""

import argparse
import shlex
from typing import NamedTuple

import httpx

from tests import web

SERVER = "http://127.0.0.1:8000"


class Sent(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: str | None

    def to(self, url: str) -> httpx.Response:
        return web.request(self.method, url + self.path, content=self.body, headers=self.headers)


def read_curl(command: str) -> Sent:
    """What `curl …` sends; only the options that the documents use are known."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("url")
    parser.add_argument("-X")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    parser.add_argument("-N", action="store_true")
    given = parser.parse_args(shlex.split(command.removeprefix("curl ")))
    assert given.url.startswith(SERVER), given.url
    form = {} if given.d is None else {"Content-Type": "application/x-www-form-urlencoded"}
    headers = form | dict(header.split(": ", 1) for header in given.H)
    method = given.X or ("GET" if given.d is None else "POST")
    return Sent(method, given.url.removeprefix(SERVER), headers, given.d)
