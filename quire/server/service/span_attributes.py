"""The attributes of a request's span, by OpenTelemetry's conventions for generative AI and for HTTP. Never its text."""

from typing import Any

from quire.request import FinishReason
from quire.server.service.stream import Stream

CHATS = ("chat_completions", "responses", "messages")  # routes
GONE = 499  # the status where the client has left
FINISH_REASONS = {FinishReason.LENGTH: "length"}  # all others are "stop"


def attributes_at_open(stream: Stream) -> dict[str, Any]:
    """Those that are known when a request is sent to the engine."""
    request = stream.prompts[0].request
    sampling = request.sampling
    found: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if stream.arrival.route in CHATS else "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": request.adapter or stream.service.model.name,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.choice.count": request.samples,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "quire.request_id": stream.arrival.request_id,
    }
    return found | ({"gen_ai.request.seed": request.seed} if sampling.temperature else {})


def attributes_at_end(stream: Stream) -> dict[str, Any]:
    """Those that are known when it is over."""
    samples = [sample for prompt in stream.prompts for sample in prompt.samples]
    reasons = [FINISH_REASONS.get(sample.finish, "stop") for sample in samples if sample.finish is not None]
    return {
        "gen_ai.response.model": stream.prompts[0].request.adapter or stream.service.model.name,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": stream.num_prompt_tokens,
        "gen_ai.usage.output_tokens": stream.num_tokens,
        "gen_ai.usage.cache_read.input_tokens": stream.num_cached_tokens,
        "http.response.status_code": _status(stream),
        "quire.outcome": stream.record.outcome,
    }


def _status(stream: Stream) -> int:
    if stream.has_status or (stream.error is None and stream.is_over):
        return 200
    return GONE if stream.error is None else stream.arrival.status_of(stream.error)
