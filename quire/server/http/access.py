"""Who may ask."""

import hashlib
import hmac
from collections.abc import Collection

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import Unauthorized
from quire.server.api.openai.errors import error_response
from quire.server.tenant import tenant

# What load balancers and scrapers ask without a key.
OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/health/generate", "/ping", "/metrics", "/info", "/v1/models", "/api-doc/openapi.json",
     "/docs", "/v2", "/v2/health/live", "/v2/health/ready"}
)  # fmt: skip


class Access:
    """Lets requests through that carry one of the keys, compared without telling by the time how much was right."""

    def __init__(
        self,
        app: ASGIApp,
        keys: tuple[str, ...],
        *,
        open_paths: Collection[str] = (),
        silent: bool = False,
        keeps_apart: bool = False,
    ) -> None:
        """`silent`: who is not let in is not told why. `keeps_apart`: each key is a tenant of its own."""
        self._app = app
        self._open_paths = OPEN_PATHS | set(open_paths)
        self._silent = silent
        self._keeps_apart = keeps_apart
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        refusal = Response(status_code=401) if self._silent else error_response(Unauthorized(message))
        await refusal(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["path"] in self._open_paths or (scope["path"] == "/" and scope["method"] in ("GET", "HEAD")):
            return True
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever matches
        if self._keeps_apart:
            tenant.set(digest.hex())
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
