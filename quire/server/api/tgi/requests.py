"""The fields of text-generation-inference's own routes."""

from typing import Any

import msgspec

from quire.server.api.validation import Refusal


class GenerateRequest(msgspec.Struct, kw_only=True):
    inputs: str
    parameters: dict[str, Any] | None = None
    stream: bool | None = None  # of POST / and /invocations; the other routes say it by their name
    timings: bool | None = None  # the answer, or the last event, says where the time went


class Parameters(msgspec.Struct, kw_only=True):
    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None  # the name of an adapter


class TokenizeRequest(msgspec.Struct, kw_only=True):
    inputs: str
    add_special_tokens: bool | None = None
    # Accepted and unused, so that a body for /generate can be sent here unchanged.
    parameters: dict[str, Any] | None = None


PARAMETER_REFUSALS = {
    "watermark": Refusal("watermarking is not supported", (False,)),
}
