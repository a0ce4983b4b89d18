"""The tenant of the request in progress, and its API key."""

from contextvars import ContextVar

# A digest of the request's API key, where keys are isolated; empty otherwise.
tenant: ContextVar[str] = ContextVar("tenant", default="")

# A digest of the request's API key; empty where the server has no keys. Kept responses belong to it.
api_key: ContextVar[str] = ContextVar("api_key", default="")
