"""Load on a server: requests at once, or requests per second."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from quire.cli.bench.serving_client import PromptInput, RequestResult, Sampling, Server
from quire.errors import InvalidSetting

COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over such "
    "our man me even most made after also did many must before back see through way where get much go well your "
    "know should down work year because come people just say each those take day good how long own"
)
WORDS = COMMON.split()
CALIBRATIONS = 6
FIRST_WORDS = 16


class LoadRequest(NamedTuple):
    prompt: PromptInput
    sampling: Sampling


LoadConversation = Sequence[LoadRequest]  # each sent once the one before is answered


class Prompts(NamedTuple):
    """Texts of common words. They differ after the first `shared` words, so that nothing else is found in a cache."""

    words: int
    shared: int
    seed: str
    salt: str = ""  # other texts for the same seed

    def texts(self, count: int) -> Iterator[str]:
        common = Random(f"shared{self.salt}").choices(WORDS, k=min(self.shared, self.words))
        for number in range(count):
            own = Random(f"{self.salt}{self.seed}/{number}").choices(WORDS, k=max(1, self.words - len(common)))
            yield " ".join([*common, *own])

    def conversations(self, count: int, sampling: Sampling) -> Iterator[LoadConversation]:
        """Conversations of one request each."""
        return ((LoadRequest(text, sampling),) for text in self.texts(count))


@dataclass(frozen=True)
class Shape:
    """`concurrency` requests at any time, or `rate` per second at random times (a Poisson process)."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} stream{'s' if self.concurrency > 1 else ''}"
        return f"{self.rate:g} requests/s"

    @property
    def num_requests(self) -> int:
        """The default for a run."""
        return 64 if self.concurrency is None else max(8, 3 * self.concurrency)


class LoadRun(NamedTuple):
    """All requests of one run, and its duration."""

    shape: Shape
    results: list[RequestResult]
    took_s: float
    client_cpu_s: float


async def words_for(server: Server, tokens: int, sampling: Sampling) -> int:
    """Words of a prompt of `tokens` tokens, by the server's own count; `tokens` where it does not count."""
    tried: dict[int, int] = {}
    words = min(tokens, FIRST_WORDS)
    for _ in range(CALIBRATIONS):
        (prompt,) = Prompts(words, 0, "calibration").texts(1)
        result = await server.send(prompt, sampling._replace(output_tokens=2))
        if result.error is not None and result.error != "no tokens":
            raise InvalidSetting(f"{server.url} does not answer: {result.detail or result.error}")
        if result.prompt_tokens is None:
            return tokens
        tried[words] = result.prompt_tokens
        # Two lengths give the number of tokens before the words of a prompt.
        (shorter, fewer), (longer, more) = min(tried.items()), max(tried.items())
        per_word = (more - fewer) / (longer - shorter) if more > fewer else result.prompt_tokens / words
        words = max(1, words + round((tokens - result.prompt_tokens) / per_word))
        if words in tried:
            break
    return min(tried, key=lambda count: abs(tried[count] - tokens))


async def run_load(
    server: Server,
    shape: Shape,
    conversations: Iterable[LoadConversation],
    *,
    within_s: float,
    seed: str = "",
    arrivals_s: float | None = None,
    ended: Callable[[], None] = lambda: None,
) -> LoadRun:
    """Hold all `conversations`; those that have not ended `within_s` are cut off.

    At a rate, they begin at random times that follow from `seed`, and none begins after `arrivals_s`.
    """
    begun, cpu = time.monotonic(), time.process_time()
    done: list[RequestResult] = []
    waiting = iter(conversations)

    async def send_all(conversation: LoadConversation) -> None:
        for prompt, sampling in conversation:
            result = RequestResult()
            try:
                await server.send(prompt, sampling, result)
            finally:
                done.append(result)
                ended()
            if result.error is not None:
                return

    async def hold_in_turn() -> None:
        for conversation in waiting:
            await send_all(conversation)

    async def hold_at_random(group: asyncio.TaskGroup, rate: float) -> None:
        random, at_s = Random(seed), 0.0
        for conversation in waiting:
            await asyncio.sleep(max(0.0, begun + at_s - time.monotonic()))
            group.create_task(send_all(conversation))
            at_s += random.expovariate(rate)
            if arrivals_s is not None and at_s > arrivals_s:
                return

    with suppress(TimeoutError):
        async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
            if shape.rate is not None:
                group.create_task(hold_at_random(group, shape.rate))
            for _ in range(shape.concurrency or 0):
                group.create_task(hold_in_turn())
    return LoadRun(shape, done, time.monotonic() - begun, time.process_time() - cpu)
