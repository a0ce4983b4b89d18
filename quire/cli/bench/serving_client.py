"""A client of OpenAI-compatible servers that records the arrival time of each piece of an answer.

The standard library's sockets and nothing else: on a small machine the client must leave the processor to the server.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from quire.errors import InvalidSetting

PromptInput = str | list[int]  # token ids, for completions
MAX_ERROR_BYTES = 300
READ_BYTES = 1 << 16


class AnswerRefused(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status


class StreamDelta(msgspec.Struct):
    content: str | None = None


class StreamChoice(msgspec.Struct):
    text: str | None = None
    delta: StreamDelta | None = None


class StreamUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class StreamChunk(msgspec.Struct):
    """The fields of an event that are read."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        return any(choice.text or (choice.delta is not None and choice.delta.content) for choice in self.choices)


_read_chunk = msgspec.json.Decoder(StreamChunk).decode


@dataclass
class RequestResult:
    """One request and its outcome; times on the monotonic clock."""

    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)  # of each piece with text
    ended_s: float = 0.0
    wanted_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int | None = None
    is_counted_by_server: bool = False
    error: str | None = None  # its kind, short, since errors are counted by it
    detail: str | None = None


class Sampling(NamedTuple):
    """Sampling fields of a request."""

    output_tokens: int
    temperature: float = 0.0
    ignores_end: bool = True
    extra: Mapping[str, Any] = {}  # fields that are added to the body


class Server:
    """One server. `timeout_s` bounds the time between two pieces of an answer."""

    def __init__(self, url: str, *, api_key: str = "", is_chat: bool = False, timeout_s: float = 120.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidSetting(f"{url!r} is not the address of a server, like http://127.0.0.1:8000")
        self.url = url
        self.model = ""
        self.is_chat = is_chat
        self.timeout_s = timeout_s
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc}\r\nConnection: close\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def find_model(self) -> None:
        """The first model that the server lists."""
        body = b"".join([piece async for _, piece in self._pieces("GET", "/v1/models", None)])
        try:
            self.model = str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise InvalidSetting(f"{self.url}/v1/models does not name a model; --model does") from None

    async def send(self, prompt: PromptInput, sampling: Sampling, result: RequestResult | None = None) -> RequestResult:
        """Send a request and fill in `result`, with its error too: failures of server and network do not raise."""
        result = result or RequestResult()
        result.sent_s, result.wanted_tokens = time.monotonic(), sampling.output_tokens
        try:
            await self._stream(result, prompt, sampling)
            if not result.arrivals_s and result.error is None:
                result.error = "no tokens"
        except AnswerRefused as error:
            result.error, result.detail = f"HTTP {error.status}", str(error)
        except TimeoutError:
            result.error, result.detail = "timeout", f"nothing came for {self.timeout_s:g} s"
        except ConnectionRefusedError as error:
            result.error, result.detail = "refused", str(error)
        except (OSError, EOFError, ValueError) as error:
            result.error, result.detail = "disconnected", repr(error)
        except asyncio.CancelledError:
            result.error = "cut off"  # by the bound on the whole run
            raise
        finally:
            result.ended_s = time.monotonic()
        return result

    async def _stream(self, result: RequestResult, prompt: PromptInput, sampling: Sampling) -> None:
        num_pieces, is_complete, rest = 0, False, b""
        async for arrived_s, piece in self._pieces("POST", *self._request(prompt, sampling)):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    is_complete = True
                    continue
                chunk = _read_chunk(data)
                if chunk.error is not None:
                    result.error, result.detail = "error in stream", str(chunk.error)[:MAX_ERROR_BYTES]
                if chunk.has_text:
                    num_pieces += 1
                    result.arrivals_s.append(arrived_s)
                if chunk.usage is not None and chunk.usage.completion_tokens is not None:
                    result.output_tokens, result.is_counted_by_server = chunk.usage.completion_tokens, True
                    result.prompt_tokens = chunk.usage.prompt_tokens
        if not result.is_counted_by_server:
            result.output_tokens = num_pieces
        if not is_complete and result.error is None:
            raise EOFError("the stream ended without [DONE]")

    def _request(self, prompt: PromptInput, sampling: Sampling) -> tuple[str, bytes]:
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": sampling.output_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.ignores_end:
            body["ignore_eos"] = True
        if self.is_chat:
            return "/v1/chat/completions", json.dumps(
                body | {"messages": [{"role": "user", "content": prompt}]} | dict(sampling.extra)
            ).encode()
        return "/v1/completions", json.dumps(body | {"prompt": prompt} | dict(sampling.extra)).encode()

    async def _pieces(self, method: str, path: str, body: bytes | None) -> AsyncIterator[tuple[float, bytes]]:
        """The body of the answer as it comes."""
        tls = ssl.create_default_context() if self._tls else None
        async with asyncio.timeout(self.timeout_s):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=tls, limit=1 << 22)
        try:
            head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}"
            if body is not None:
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}\r\n".encode() + (body or b""))
            async with asyncio.timeout(self.timeout_s):
                answer = await reader.readuntil(b"\r\n\r\n")
            status, fields = _head(answer)
            pieces = self._body(reader, fields)
            if status != 200:
                said = b"".join([piece async for _, piece in pieces])
                raise AnswerRefused(status, said[:MAX_ERROR_BYTES].decode(errors="replace"))
            async for piece in pieces:
                yield piece
        finally:
            writer.close()

    async def _body(self, reader: asyncio.StreamReader, fields: dict[str, str]) -> AsyncIterator[tuple[float, bytes]]:
        left = int(fields["content-length"]) if "content-length" in fields else None
        is_chunked = "chunked" in fields.get("transfer-encoding", "")
        while left != 0:
            async with asyncio.timeout(self.timeout_s):
                if is_chunked:
                    size = int((await reader.readline()).split(b";")[0], 16)
                    piece = (await reader.readexactly(size + 2))[:-2]
                else:
                    piece = await reader.read(READ_BYTES if left is None else min(left, READ_BYTES))
            if not piece:
                if left:
                    raise EOFError(f"{left} bytes of the answer are missing")
                return
            if left is not None:
                left -= len(piece)
            yield time.monotonic(), piece


def _head(answer: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = answer.decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), fields
