"""Requests of every length, many of which begin alike."""

from typing import Any

import numpy as np

from quire.request import Request, SamplingParams
from tests.executor.rig import Rig

GREEDY = SamplingParams(temperature=0)


def workload(rig: Rig, count: int, seed: int = 0, longest: int = 150, **changes: Any) -> list[Request]:
    rng = np.random.default_rng(seed)
    vocab_size = rig.model.vocab_size
    stems = [rng.integers(0, vocab_size, longest).tolist() for _ in range(3)]
    requests = []
    for number in range(count):
        length = int(rng.choice([1, 2, *rng.integers(1, longest + 1, 6)]))
        shared = int(rng.integers(0, length + 1)) if rng.random() < 0.6 else 0
        stem = stems[rng.integers(len(stems))]
        prompt = (*stem[:shared], *rng.integers(0, vocab_size, length - shared).tolist())
        fields: dict[str, Any] = {"max_tokens": int(rng.integers(1, 25)), "sampling": GREEDY, "seed": number}
        requests.append(Request(number, prompt, salt=rig.salt(prompt), **(fields | changes)))
    return requests
