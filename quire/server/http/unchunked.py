"""Answers of HTTP/1.0."""

from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class Unchunked:
    """Serves HTTP/1.0, which has no chunks: answers without a length end when the connection closes."""

    cycle: RequestResponseCycle

    def __init__(self, app: ASGI3Application) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        cycle = self.cycle
        has_length = True

        async def send_unchunked(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.keep_alive = False
                cycle.chunked_encoding = False
                cycle.expected_content_length = len(message.get("body", b""))  # of this part: nothing more is checked
            await send(message)

        await self._app(scope, receive, send_unchunked)
