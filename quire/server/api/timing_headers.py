"""The x-* headers of whole answers."""

import time

from quire.server.service.stream import Stream


def timing_headers(stream: Stream, num_characters: int) -> dict[str, str]:
    """Where the time went; milliseconds, but for the compute time."""
    now = time.monotonic()
    total_s = now - stream.opened_s
    inference_s = now - stream.submitted_s - stream.queue_s
    return {
        "x-compute-type": stream.service.settings.compute_type or stream.service.platform,
        "x-compute-time": f"{total_s:.6f}",
        "x-compute-characters": str(num_characters),
        "x-total-time": _ms(total_s),
        "x-validation-time": _ms(stream.submitted_s - stream.opened_s),
        "x-queue-time": _ms(stream.queue_s),
        "x-inference-time": _ms(inference_s),
        "x-time-per-token": _ms(inference_s / max(1, stream.num_tokens)),
        "x-prompt-tokens": str(stream.num_prompt_tokens),
        "x-generated-tokens": str(stream.num_tokens),
    }


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))
