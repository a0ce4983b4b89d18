"""API keys of requests."""

import hmac
from collections.abc import Sequence

from starlette.types import Scope

from quire.errors import Unauthorized
from quire.server.api_keys import ApiKey, digest_of
from quire.server.caller import key_name
from quire.server.tenant import api_key, tenant


class Access:
    """Checks API keys in constant time."""

    def __init__(self, keys: Sequence[ApiKey], *, isolates: bool) -> None:
        """`isolates`: each key is a tenant of its own."""
        self._isolates = isolates
        self._names = [key.name for key in keys]
        self._digests = [key.digest for key in keys]

    def check(self, scope: Scope) -> None:
        """Raise where the request has none of the keys."""
        for sent in _sent_keys(scope):
            digest = digest_of(sent)
            matches = [hmac.compare_digest(digest, known) for known in self._digests]  # compare all, whichever matches
            if any(matches):
                api_key.set(digest.hex())
                key_name.set(self._names[matches.index(True)])
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
