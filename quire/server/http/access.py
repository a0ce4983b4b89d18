"""API keys."""

import hashlib
import hmac

from starlette.types import Scope

from quire.errors import Unauthorized
from quire.server.tenant import api_key, tenant


class Access:
    """Checks API keys in constant time."""

    def __init__(self, keys: tuple[str, ...], *, isolates: bool) -> None:
        """`isolates`: each key is a tenant of its own."""
        self._isolates = isolates
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, scope: Scope) -> None:
        """Raise where the request has none of the keys."""
        for digest in [_digest(key) for key in _sent_keys(scope)]:
            matches = [hmac.compare_digest(digest, known) for known in self._digests]  # compare all, whichever matches
            if any(matches):
                api_key.set(digest.hex())
                if self._isolates:
                    tenant.set(digest.hex())
                return
        raise Unauthorized("the API key is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key")


def _sent_keys(scope: Scope) -> list[bytes]:
    """Clients of the Anthropic API have a header of their own for the key."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    sent = [key] if scheme.lower() == b"bearer" else []
    return [key.strip() for key in (*sent, headers.get(b"x-api-key", b"")) if key.strip()]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
