"""Answers that are texts and nothing else."""

from collections.abc import Callable
from typing import Any

from quire.server.api.job import WriteBody
from quire.server.service.answers import Answer, by_likelihood
from quire.server.service.ledger import ledger
from quire.server.service.stream import Stream


def texts_body(prefixes: list[str], write: Callable[[list[str]], Any]) -> WriteBody:
    """The best answer to each prompt, after its prefix; `write` makes the body, an object, of the texts."""

    def body(stream: Stream, answers: list[list[Answer]]) -> Any:
        best = [by_likelihood(samples)[0] for samples in answers]
        written = write([prefix + answer.text for prefix, answer in zip(prefixes, best, strict=True)])
        return written | {"timings": ledger(stream)} if stream.arrival.wants_timings else written

    return body
