"""On whose behalf a request is worked on."""

from contextvars import ContextVar

# A name for the API key that the request came with, where keys are kept apart; empty otherwise. It is not the key.
tenant: ContextVar[str] = ContextVar("tenant", default="")
