"""Whole answers, for requests that do not stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Receive

from quire.ipc.messages import TokenLogprobs
from quire.request import FinishReason
from quire.server.service.open_prompt import TokenDelta
from quire.server.service.stream import Stream


class ClientGone(Exception):
    """The client closed the connection."""


class ClientGoneEarly(ClientGone):
    """It did so before it had sent its whole body. There is no stream that counts the request."""


class Answer:
    """One sample of one prompt, complete."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.token_texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish = FinishReason.LENGTH

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def mean_logprob(self) -> float:
        return sum(each.logprob for each in self.logprobs) / max(1, len(self.logprobs))

    def add(self, delta: TokenDelta) -> None:
        self.texts.append(delta.text)
        if delta.token is not None:
            self.tokens.append(delta.token)
            self.token_texts.append(delta.text)
        if delta.logprobs is not None:
            self.logprobs.append(delta.logprobs)
        if delta.finish is not None:
            self.finish = delta.finish


def by_likelihood(answers: list[Answer]) -> list[Answer]:
    """The answers, most likely first."""
    return sorted(answers, key=lambda answer: -answer.mean_logprob)


async def collect(stream: Stream, receive: Receive) -> list[list[Answer]]:
    """The answers by prompt and sample. Aborts them when the client goes away."""
    answers = [[Answer() for _ in prompt.samples] for prompt in stream.prompts]
    async with closing_when_gone(stream, receive):
        while deltas := await stream.read():
            for delta in deltas:
                answers[delta.prompt][delta.sample].add(delta)
        if not stream.is_over:
            raise ClientGone
    return answers


@contextlib.asynccontextmanager
async def closing_when_gone(stream: Stream, receive: Receive) -> AsyncIterator[None]:
    """Closes `stream` at the end, and as soon as the client closes its connection."""
    try:
        async with watching(stream, receive):
            yield
    finally:
        stream.close()


@contextlib.asynccontextmanager
async def watching(stream: Stream, receive: Receive) -> AsyncIterator[None]:
    """Closes `stream` when the client closes its connection meanwhile."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stream.close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
