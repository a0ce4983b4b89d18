"""Traces of requests, and engines that they are played to: how much is found in caches, and how even the load is."""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.server.service.routing import BLOCK_TOKENS, EngineRouter, KnownBlocks, blocks_of, weight_of

SECONDS_PER_TOKEN = 0.02
PREFILL_TOKENS_PER_S = 8000.0


class Asked(NamedTuple):
    at_s: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


Trace = list[Asked]


def tokens(chance: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(chance.choices(range(50_000), k=chance.randint(low, high)))


def chats(seed: int, num_chats: int = 150, num_systems: int = 6, rate: float = 3.0) -> Trace:
    """Conversations of several turns. Each begins with one of a few system prompts, and repeats all that was said."""
    chance = random.Random(seed)
    systems = [tokens(chance, 200, 1500) for _ in range(num_systems)]
    asked, begins_s = [], 0.0
    for _ in range(num_chats):
        begins_s += chance.expovariate(rate)
        at_s, said = begins_s, chance.choice(systems)
        for _ in range(chance.randint(1, 8)):
            said += tokens(chance, 10, 300)
            answer = tokens(chance, 20, 400)
            asked.append(Asked(at_s, said, answer))
            said += answer
            at_s += len(answer) * SECONDS_PER_TOKEN + chance.expovariate(1 / 10.0)
    return sorted(asked)


def documents(seed: int, num_requests: int = 400, num_documents: int = 40, rate: float = 8.0) -> Trace:
    """Questions about long documents, some of which are asked about much more often than others."""
    chance = random.Random(seed)
    texts = [tokens(chance, 1000, 6000) for _ in range(num_documents)]
    popular = [1 / (rank + 1) for rank in range(num_documents)]
    asked, at_s = [], 0.0
    for _ in range(num_requests):
        at_s += chance.expovariate(rate)
        document = chance.choices(texts, popular)[0]
        asked.append(Asked(at_s, document + tokens(chance, 10, 60), tokens(chance, 20, 300)))
    return asked


def unrelated(seed: int, num_requests: int = 400, rate: float = 10.0) -> Trace:
    chance = random.Random(seed)
    asked, at_s = [], 0.0
    for _ in range(num_requests):
        at_s += chance.expovariate(rate)
        asked.append(Asked(at_s, tokens(chance, 50, 1500), tokens(chance, 20, 400)))
    return asked


def one_crowd(seed: int, num_requests: int = 300, rate: float = 30.0) -> Trace:
    """All begin with one long system prompt, more of them than one engine should have."""
    chance = random.Random(seed)
    system, at_s = tokens(chance, 3000, 3000), 0.0
    asked = []
    for _ in range(num_requests):
        at_s += chance.expovariate(rate)
        asked.append(Asked(at_s, system + tokens(chance, 10, 200), tokens(chance, 20, 400)))
    return asked


TRACES: dict[str, Callable[[int], Trace]] = {
    "chats": chats,
    "documents": documents,
    "unrelated": unrelated,
    "one crowd": one_crowd,
    "mixed": lambda seed: sorted(chats(seed) + documents(seed, rate=4.0) + unrelated(seed, rate=4.0)),
}


class Outcome(NamedTuple):
    hit_rate: float  # tokens found in caches, of those of prompts
    balance: float  # mean over arrivals of the sequences of the fullest engine, in units of the average


# Chooses an engine by the blocks of a prompt and the loads.
Policy = Callable[[Sequence[int], list[float]], int]


class Workers:
    """Requests come to the workers in turn. Each hears of what the others have sent after `delay` more requests."""

    def __init__(self, num_engines: int, num_workers: int = 1, delay: int = 0) -> None:
        self._routers = [EngineRouter(num_engines) for _ in range(num_workers)]
        self._unheard: deque[tuple[EngineRouter, int, Sequence[int]]] = deque()
        self._delay = delay
        self._turn = 0

    def __call__(self, blocks: Sequence[int], loads: list[float]) -> int:
        self._turn += 1
        router = self._routers[self._turn % len(self._routers)]
        chosen = router.choose(blocks, loads)
        router.sent(chosen, blocks)
        self._unheard.append((router, chosen, blocks))
        if len(self._unheard) > self._delay:
            sender, engine, sent = self._unheard.popleft()
            for other in self._routers:
                if other is not sender:
                    other.sent(engine, sent)
        return chosen


def by_chance(seed: int) -> Policy:
    chance = random.Random(seed)
    return lambda blocks, loads: chance.randrange(len(loads))


def least_loaded(blocks: Sequence[int], loads: list[float]) -> int:
    return min(range(len(loads)), key=loads.__getitem__)


def play(trace: Trace, choose: Policy, num_engines: int = 4, cache_tokens: int = 60_000) -> Outcome:
    """Engines with caches of so many tokens, in which prompts and answers stay until others need the room."""
    caches = [KnownBlocks(cache_tokens // BLOCK_TOKENS) for _ in range(num_engines)]
    loads, counts = [0.0] * num_engines, [0] * num_engines
    running: list[tuple[float, int, float, tuple[int, ...]]] = []
    num_tokens = num_hits = 0
    shares = []
    for at_s, prompt, answer in trace:
        while running and running[0][0] <= at_s:
            _, engine, weight, said = heapq.heappop(running)
            loads[engine] -= weight
            counts[engine] -= 1
            caches[engine].use(blocks_of(said, ""))
        blocks = blocks_of(prompt, "")
        engine = choose(blocks, list(loads))
        known = caches[engine].num_known(blocks)
        caches[engine].use(blocks)
        num_tokens += len(prompt)
        num_hits += known * BLOCK_TOKENS
        weight = weight_of(1, len(prompt), known)
        loads[engine] += weight
        counts[engine] += 1
        takes_s = (len(prompt) - known * BLOCK_TOKENS) / PREFILL_TOKENS_PER_S + len(answer) * SECONDS_PER_TOKEN
        heapq.heappush(running, (at_s + takes_s, engine, weight, prompt + answer))
        if sum(counts) >= 2 * num_engines:  # fewer cannot be even
            shares.append(max(counts) * num_engines / sum(counts))
    return Outcome(num_hits / num_tokens, sum(shares) / len(shares))
