"""Greedy answers that part from the right one where two tokens were as good as level.

A stream that goes on computes its past in other shapes than it was generated in, and the rounding of float32 can then
decide between two tokens. This tells such an answer from a wrong one.
"""

from typing import Any, NamedTuple

import httpx

LEVEL = 1e-3  # of log-probability; float32 leaves about 1e-5 open


class Scored(NamedTuple):
    """An undisturbed greedy answer."""

    text: str
    starts: list[int]  # of each token in the text
    gaps: list[float]  # from each token to the next likely one


async def score(client: httpx.AsyncClient, asked: dict[str, Any]) -> Scored:
    answer = await client.post("/v1/completions", json=asked | {"logprobs": 2})
    (choice,) = answer.raise_for_status().json()["choices"]
    told = choice["logprobs"]
    likely = (sorted(one.values(), reverse=True) for one in told["top_logprobs"])
    return Scored(choice["text"], told["text_offset"], [scores[0] - scores[1] for scores in likely])


def is_near_tie(right: Scored, said: str) -> bool:
    """Whether `said`, which is not what `right` says, parts from it at a token that another was level with."""
    shorter = min(len(right.text), len(said))
    at = next((at for at in range(shorter) if right.text[at] != said[at]), shorter)
    ends = [*right.starts[1:], len(right.text)]
    # A token that begins like another parts from it only where the next one begins.
    parted = [gap for start, end, gap in zip(right.starts, ends, right.gaps, strict=True) if start <= at <= end]
    return bool(parted) and min(parted) < LEVEL
