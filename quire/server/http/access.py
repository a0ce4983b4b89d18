"""API keys."""

import hashlib
import hmac

from starlette.types import Scope

from quire.errors import Unauthorized
from quire.server.tenant import tenant


class Access:
    """Checks API keys in constant time."""

    def __init__(self, keys: tuple[str, ...], *, isolates: bool) -> None:
        """`isolates`: each key is a tenant of its own."""
        self._isolates = isolates
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, scope: Scope) -> None:
        """Raise where the request has none of the keys."""
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # compare all, whichever matches
        if scheme.lower() != b"bearer" or not any(matches):
            raise Unauthorized("the API key is missing or wrong; send it as Authorization: Bearer KEY")
        if self._isolates:
            tenant.set(digest.hex())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
