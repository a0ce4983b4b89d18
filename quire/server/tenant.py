"""The tenant of the request in progress."""

from contextvars import ContextVar

# A digest of the request's API key, where keys are isolated; empty otherwise.
tenant: ContextVar[str] = ContextVar("tenant", default="")
