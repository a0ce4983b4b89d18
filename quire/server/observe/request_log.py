"""A line in the log for each request. Never what was said in it."""

import logging
import time

from quire.server.service.stream import Stream

log = logging.getLogger(__name__)


def log_request(stream: Stream) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    outcome = "answered" if stream.is_over else "dropped"
    details = {
        "outcome": outcome if stream.error is None else stream.error.kind,
        "prompt_tokens": stream.num_prompt_tokens,
        "cached_tokens": stream.num_cached_tokens,
        "generated_tokens": stream.num_tokens,
        "queue_ms": round(stream.queue_s * 1000, 1),
        "total_ms": round((time.monotonic() - stream.opened_s) * 1000, 1),
    }
    if stream.first_s is not None:
        details["first_token_ms"] = round((stream.first_s - stream.opened_s) * 1000, 1)
    if stream.user is not None:
        details["user"] = stream.user[:100]
    log.info("request", extra=details)
