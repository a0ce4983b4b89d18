"""The causes of waiting in the queue."""

from enum import Enum


class Blocker(Enum):
    """A cause that keeps the head of the queue waiting: the limit of a setting, or something that is short.

    Clients are told the `client_name`, in `blocked_s`; settings that limit the same thing share one.
    """

    def __init__(self, cause: str, client_name: str) -> None:
        self.cause = cause
        self.client_name = client_name

    SLOTS = "max_batch_size", "slots"
    PAGES = "pages", "pages"
    PREFILL_TOKENS = "max_batch_prefill_tokens", "budget"
    TOTAL_TOKENS = "max_batch_total_tokens", "budget"
    WAITING_RULE = "waiting_served_ratio", "waiting_rule"
    SHARED_PREFIX = "shared_prefix", "shared_prefix"
    ADAPTERS = "adapters", "adapters"
