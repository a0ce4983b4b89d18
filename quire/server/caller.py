"""The caller of the request in progress, as code far from HTTP knows it."""

import re
import secrets
from contextvars import ContextVar

REQUEST_ID = "x-request-id"
_SAFE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

# The id of the request: its client's own, or one that this server made.
request_id: ContextVar[str] = ContextVar("request_id", default="")
# The name of its API key; empty where none is needed.
key_name: ContextVar[str] = ContextVar("key_name", default="")


def request_id_from(given: str | None) -> str:
    """The id that a client sent, where it can stand in headers and logs; otherwise a new one."""
    return given if given is not None and _SAFE.fullmatch(given) else f"req_{secrets.token_hex(12)}"
