"""A request of a crossing while its fields are chosen."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from quire.request import Request, SamplingParams
from tests.crossings.engine_setup import EngineSetup

MAX_PROMPT, MAX_ANSWER = 40, 20  # tokens


@dataclass
class RequestDraft:
    chance: Random
    setup: EngineSetup
    number: int  # of the request in its crossing
    prompt: tuple[int, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    def as_request(self, request_id: int) -> Request:
        sampling = SamplingParams(**({"temperature": 0.0} | self.sampling))
        return Request(request_id, self.prompt, sampling=sampling, **self.fields)


def plain_draft(chance: Random, setup: EngineSetup, number: int) -> RequestDraft:
    """Few distinct tokens and lengths: prompts share beginnings, and end inside pages and at their ends."""
    length = chance.choice([1, 2, 4, 7, 8, 12, 17, 20, 26])
    if chance.random() < 0.5:
        prompt = tuple(range(1, length + 1))
    else:
        prompt = tuple(chance.randrange(1, 3) for _ in range(length))
    draft = RequestDraft(chance, setup, number, prompt)
    draft.fields["max_tokens"] = chance.choice([1, 2, 5, 8, 13, MAX_ANSWER])
    draft.fields["seed"] = chance.randrange(1000)
    return draft
