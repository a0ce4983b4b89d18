"""Answers that part from the right one where two tokens were as good as level.

A stream that goes on computes its past in other shapes than it was generated in, and the rounding of float32 can then
decide between two tokens: two that are equally likely where the likeliest is taken, or two between which a number that
was drawn happens to fall. This tells such an answer from a wrong one.
"""

from typing import Any, NamedTuple

import httpx

LEVEL = 1e-3  # of log-probability; float32 leaves about 1e-5 open
NUDGES = (1e-5, -1e-5, 1e-4, -1e-4)  # of a temperature, which move what is drawn by about as much


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


def parting(right: str, said: str) -> int:
    """The first character in which they differ."""
    shorter = min(len(right), len(said))
    return next((at for at in range(shorter) if right[at] != said[at]), shorter)


def is_near_tie(right: Scored, said: str) -> bool:
    """Whether `said`, which is not what `right` says, parts from it at a token that another was level with."""
    at = parting(right.text, said)
    ends = [*right.starts[1:], len(right.text)]
    # A token that begins like another parts from it only where the next one begins.
    parted = [gap for start, end, gap in zip(right.starts, ends, right.gaps, strict=True) if start <= at <= end]
    return bool(parted) and min(parted) < LEVEL


async def was_drawn_between(client: httpx.AsyncClient, asked: dict[str, Any], right: str, said: str) -> bool:
    """Whether what is drawn at a temperature that is hardly another one parts from `right` as `said` does."""
    at = parting(right, said)
    for nudge in NUDGES:
        nudged = asked | {"temperature": asked["temperature"] * (1 + nudge)}
        answer = await client.post("/v1/completions", json=nudged)
        (choice,) = answer.raise_for_status().json()["choices"]
        if parting(right, choice["text"]) == at and choice["text"][at : at + 1] == said[at : at + 1]:
            return True
    return False
