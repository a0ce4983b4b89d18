"""The events of /generate_stream."""

import msgspec

from quire.errors import QuireError
from quire.server.api.tgi.details import FINISH_REASONS, seed_shown, token_entry, top_entries
from quire.server.api.tgi.errors import error_body
from quire.server.api.tgi.responses import GeneratedToken
from quire.server.service.ledger import ledger
from quire.server.service.prompt import Delta
from quire.server.service.stream import Stream


class GenerateEvents:
    """One event for each token; the last one has the whole text and the details."""

    largest_event = 0

    def __init__(self, stream: Stream, top_n_tokens: int, prefix: str) -> None:
        """`prefix` stands before the generated text, where the full text was asked for."""
        self._stream = stream
        self._tokenizer = stream.service.model.tokenizer
        self._top_n_tokens = top_n_tokens
        self._texts = [prefix]
        self._index = 0

    def encode(self, deltas: list[Delta]) -> bytes:
        return b"".join([self._event(delta) for delta in deltas])

    def _event(self, delta: Delta) -> bytes:
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
        return b"data:" + msgspec.json.encode(error_body(error)) + b"\n\n"
