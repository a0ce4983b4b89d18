"""Clients that know what they should hear."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from tests.patience import WAIT_S


@dataclass
class Heard:
    """What came of one request."""

    texts: list[str] = field(default_factory=list)  # by choice
    finish: list[str | None] = field(default_factory=list)
    error: dict[str, Any] | None = None
    status: int = 0
    was_cut: bool = False  # the connection ended before the answer did

    @property
    def is_complete(self) -> bool:
        return self.error is None and not self.was_cut and bool(self.finish) and all(self.finish)


async def stream(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    delay_s: float = 0.0,
    leave_after: int | None = None,
    heard: Heard | None = None,
) -> Heard:
    """Ask for a completion as a stream and listen; slowly, or only for so many events. `heard` fills as it comes."""
    choices = body.get("n", 1)
    heard = heard or Heard()
    heard.texts[:], heard.finish[:] = [""] * choices, [None] * choices
    num_events = 0
    try:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            heard.status = answer.status_code
            if answer.status_code != 200:
                heard.error = json.loads(await answer.aread())
                return heard
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                _take(heard, json.loads(line.removeprefix("data: ")))
                num_events += 1
                if leave_after is not None and num_events >= leave_after:
                    heard.was_cut = True
                    return heard
                if delay_s:
                    await asyncio.sleep(delay_s)
    except httpx.HTTPError:
        heard.was_cut = True
    return heard


def _take(heard: Heard, event: dict[str, Any]) -> None:
    if "error" in event:
        heard.error = event
        return
    for choice in event["choices"]:
        heard.texts[choice["index"]] += choice["text"]
        heard.finish[choice["index"]] = choice["finish_reason"] or heard.finish[choice["index"]]


async def stream_all(
    url: str, bodies: list[dict[str, Any]], heard: list[Heard] | None = None, timeout_s: float = WAIT_S
) -> list[Heard]:
    """All at once."""
    into = heard or [Heard() for _ in bodies]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as client:
        asking = (stream(client, body, heard=one) for body, one in zip(bodies, into, strict=True))
        return list(await asyncio.gather(*asking))


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]  # in lower case
    content: bytes


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def written(path: str, body: dict[str, Any]) -> bytes:
    """A request as bytes, on a connection of its own."""
    content = json.dumps(body).encode()
    lines = f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", "connection: close"
    return "\r\n".join([*lines, f"content-length: {len(content)}\r\n\r\n"]).encode() + content


async def post(url: str, asked: bytes) -> Answer:
    """One request over a bare socket: other clients take several times the processor time, and crowds are large.

    Raises OSError where the connection ends before the answer.
    """
    reader, writer = await asyncio.open_connection(*address(url))
    try:
        writer.write(asked)
        raw = await reader.read()
    finally:
        writer.close()
    head, _, content = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
    if len(content) != int(headers.get("content-length", -1)):
        raise ConnectionError(f"cut off after {raw!r}")
    return Answer(int(first.split()[1]), headers, content)
