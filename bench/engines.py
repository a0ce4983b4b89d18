"""Engines in this process: requests that are run to their end, and prompts for them."""

import random
import time
from typing import NamedTuple

from quire.engine.engine import Engine
from quire.request import Request, SamplingParams

GREEDY = SamplingParams(temperature=0)


class Answer(NamedTuple):
    first_s: float  # time to the first token
    cached_tokens: int  # of the prompt, that were not computed
    tokens: list[int]
    pauses_s: list[float]  # between tokens of another request, until the first token


def run_request(engine: Engine, request: Request, beside: int | None = None) -> Answer:
    """Runs a request to its end. `beside`: another one, whose pauses are noted."""
    began_s = last_s = time.monotonic()
    first_s, cached, tokens, pauses_s = 0.0, 0, list[int](), list[float]()
    engine.add(request)
    while engine.scheduler.has(request.request_id):
        updates = engine.step().updates
        now_s = time.monotonic()
        if not first_s and any(update.request_id == beside for update in updates):
            pauses_s.append(now_s - last_s)
            last_s = now_s
        for update in updates:
            if update.request_id == request.request_id and update.tokens:
                first_s = first_s or now_s - began_s
                cached = update.cached_tokens
                tokens += update.tokens
    return Answer(first_s, cached, tokens, pauses_s)


def random_prompts(count: int, length: int, vocabulary: int) -> list[tuple[int, ...]]:
    """The same at every call."""
    chance = random.Random(1)
    return [tuple(chance.randrange(vocabulary) for _ in range(length)) for _ in range(count)]
