"""Answers that are texts and nothing else."""

from collections.abc import Callable
from typing import Any

from quire.server.http.sse import EventEncoder
from quire.server.service.answers import Answer, by_likelihood
from quire.server.service.ledger import ledger
from quire.server.service.stream import Stream


class TextsEncoder:
    """Writes the best answer to each prompt, after its prefix."""

    def __init__(self, prefixes: list[str], write: Callable[[list[str]], Any]) -> None:
        """`write` makes the body, an object, of the texts."""
        self._prefixes = prefixes
        self._write = write

    def events(self, stream: Stream) -> EventEncoder:
        raise NotImplementedError("these routes do not stream")

    def body(self, stream: Stream, answers: list[list[Answer]]) -> Any:
        best = [by_likelihood(samples)[0] for samples in answers]
        body = self._write([prefix + answer.text for prefix, answer in zip(self._prefixes, best, strict=True)])
        return body | {"timings": ledger(stream)} if stream.arrival.wants_timings else body
