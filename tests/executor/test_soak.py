"""Two thousand requests of every kind, and nothing left over."""

import gc
import os
from pathlib import Path

import jax
import numpy as np

from quire.engine.engine import Engine
from quire.request import Request, SamplingParams
from tests.executor.rig import Rig

NUM_REQUESTS = 2_000
KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_p=0.9, top_k=30),
    SamplingParams(temperature=0.8, repetition_penalty=1.1, logprobs=3),
    SamplingParams(temperature=0, presence_penalty=1.0, logit_bias={7: 2.0}),
)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_two_thousand_requests_leave_pages_and_memory_as_they_were(llama: Rig) -> None:
    rng = np.random.default_rng(60)
    stems = rng.integers(0, 300, (4, 40)).tolist()
    aborted = 0
    arrived = 0
    sizes: list[int] = []
    arrays: list[int] = []

    def request() -> Request:
        stem = stems[rng.integers(4)][: rng.integers(0, 40)]
        prompt = (*stem, *rng.integers(0, 300, rng.integers(1, 6)).tolist())
        scored = 2 if rng.random() < 0.02 else None
        return Request(
            arrived,
            prompt,
            int(rng.integers(1, 9)),
            KINDS[rng.integers(len(KINDS))],
            seed=arrived,
            end_ids=(1, 2, 3),
            prompt_logprobs=scored,
        )

    def arrive(engine: Engine, step: int) -> None:
        nonlocal aborted, arrived
        while arrived < NUM_REQUESTS and engine.scheduler.num_requests < 12:
            engine.add(request())
            arrived += 1
            if arrived % 500 == 0:
                gc.collect()
                sizes.append(resident_bytes())
                arrays.append(len(jax.live_arrays()))
        live = engine.scheduler.request_ids()
        if live and rng.random() < 0.05:
            engine.abort(int(rng.choice(live)))
            aborted += 1

    first = request()
    arrived = 1
    run = llama.run([first], between=arrive, num_pages=60, lookahead=1)
    finished = sum(answer.finish is not None for answer in run.answers.values())
    assert arrived == NUM_REQUESTS
    assert not run.failures
    assert finished == NUM_REQUESTS - aborted
    assert run.engine.scheduler.stats().evicted_pages > 100
    # The answers themselves are kept by this test.
    assert sizes[-1] - sizes[0] < 24 * 2**20
    assert max(arrays) - min(arrays) < 50
