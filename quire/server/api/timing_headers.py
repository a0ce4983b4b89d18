"""The x-* headers of whole answers."""

from quire.server.service.stream import Stream


def timing_headers(stream: Stream, num_characters: int) -> dict[str, str]:
    """The times of the request, in milliseconds; x-compute-time is in seconds."""
    times = stream.times
    return {
        "x-compute-type": stream.service.settings.compute_type or stream.service.platform,
        "x-compute-time": f"{times.total_s:.6f}",
        "x-compute-characters": str(num_characters),
        "x-total-time": _ms(times.total_s),
        "x-validation-time": _ms(times.validation_s),
        "x-queue-time": _ms(times.queue_s),
        "x-inference-time": _ms(times.inference_s),
        "x-time-per-token": _ms(times.per_token_s(stream.num_tokens)),
        "x-prompt-tokens": str(stream.num_prompt_tokens),
        "x-generated-tokens": str(stream.num_tokens),
    }


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))
