"""The application of a server that starts. It answers before the modules that routes need are imported."""

from starlette.types import Receive, Scope, Send

from quire.server.caller import REQUEST_ID, request_id_from
from quire.server.http.unhealthy import unhealthy_json
from quire.server.http.web.chat_html import HTML_HEADERS, chat_html, wants_html


class Loading:
    """The application before there is a service."""

    def __init__(self) -> None:
        self.reason = "the engine is starting"
        self.is_in_vain = False  # only a restart of the server brings an engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        status, headers, body = self._answer(scope["method"], scope["path"], given.get("accept", ""))
        headers[REQUEST_ID] = request_id_from(given.get(REQUEST_ID))
        headers |= {"content-length": str(len(body)), "connection": "close"}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, method: str, path: str, accept: str) -> tuple[int, dict[str, str], bytes]:
        if path == "/" and method in ("GET", "HEAD") and wants_html(accept):
            return 200, {**HTML_HEADERS}, chat_html()  # it shows that the server starts, and retries by itself
        if path == "/health/live":
            return (503 if self.is_in_vain else 200), {}, b""
        return 503, {"content-type": "application/json", "retry-after": "5"}, unhealthy_json(self.reason)
