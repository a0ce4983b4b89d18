"""The answers of /generate, and the events of /generate_stream."""

from typing import Any

import msgspec

from quire.errors import QuireError
from quire.server.api.tgi.details import FINISH_REASONS, seed_shown, sequence_details, token_entry, top_entries
from quire.server.api.tgi.errors import error_events
from quire.server.api.tgi.requests import Parameters
from quire.server.api.tgi.responses import Details, Generated, GeneratedToken
from quire.server.service.answers import Answer, by_likelihood
from quire.server.service.ledger import ledger
from quire.server.service.open_prompt import TokenDelta
from quire.server.service.stream import Stream


class GenerateEncoder:
    """Writes the answer to one request: the best of its samples."""

    def __init__(self, parameters: Parameters, prefix: str, *, in_list: bool) -> None:
        """`prefix` stands before the generated text. `in_list`: a whole answer is the only element of a list."""
        self._parameters = parameters
        self._top_n_tokens = parameters.top_n_tokens or 0
        self._prefix = prefix
        self._in_list = in_list

    def events(self, stream: Stream) -> "GenerateEvents":
        return GenerateEvents(stream, self._top_n_tokens, self._prefix)

    def body(self, stream: Stream, answers: list[list[Answer]]) -> Any:
        best, *others = by_likelihood(answers[0])
        reply: Generated = {"generated_text": self._prefix + best.text}
        if self._parameters.details or self._parameters.decoder_input_details:
            tokenizer, prompt, count = stream.service.model.tokenizer, stream.prompts[0], self._top_n_tokens
            details: Details = {**sequence_details(tokenizer, prompt, best, count)}  # type: ignore[typeddict-item]
            reply["details"] = details
            if others:
                details["best_of_sequences"] = [
                    {"generated_text": self._prefix + other.text, **sequence_details(tokenizer, prompt, other, count)}
                    for other in others
                ]
        if stream.arrival.wants_timings:
            reply["timings"] = ledger(stream)
        return [reply] if self._in_list else reply


class GenerateEvents:
    """One event for each token; the last one has the whole text and the details."""

    largest_event = 0

    def __init__(self, stream: Stream, top_n_tokens: int, prefix: str) -> None:
        self._stream = stream
        self._tokenizer = stream.service.model.tokenizer
        self._top_n_tokens = top_n_tokens
        self._texts = [prefix]
        self._index = 0

    def encode(self, deltas: list[TokenDelta]) -> bytes:
        return b"".join([self._event(delta) for delta in deltas])

    def _event(self, delta: TokenDelta) -> bytes:
        assert delta.token is not None, "this route always generates"
        assert delta.logprobs is not None, "this route always asks for them"
        self._texts.append(delta.text)
        self._index += 1
        event: GeneratedToken = {
            "index": self._index,
            "token": token_entry(self._tokenizer, delta.token, delta.text, delta.logprobs.logprob),
            "generated_text": None,
            "details": None,
        }
        if self._top_n_tokens:
            event["top_tokens"] = top_entries(self._tokenizer, delta.logprobs, self._top_n_tokens)
        if delta.finish is not None:
            prompt = self._stream.prompts[0]
            event["generated_text"] = "".join(self._texts)
            event["details"] = {
                "finish_reason": FINISH_REASONS[delta.finish],
                "generated_tokens": self._index,
                "seed": seed_shown(prompt),
                "input_length": len(prompt.request.prompt),
            }
            if self._stream.arrival.wants_timings:
                event["timings"] = ledger(self._stream)
        return b"data:" + msgspec.json.encode(event) + b"\n\n"

    def finish(self) -> bytes:
        return b""

    def fail(self, error: QuireError) -> bytes:
        return error_events(error)
