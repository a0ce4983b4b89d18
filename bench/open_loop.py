"""Requests that arrive on their own: open-loop load on any OpenAI-compatible server, one table row per rate.

    python bench/open_loop.py http://127.0.0.1:8000 [--rates 4,12,24] [--seconds 25] [--turns 3]

Conversations begin at random times (Poisson) whatever the server does. Lengths of prompts and answers are log-normal.
Prompts are token ids, drawn once from the seed: every server gets the same load. Answers are streamed. A further turn
is sent when the one before is answered; it repeats the conversation, with random tokens in place of the answer, whose
ids the API does not tell.
"""

import argparse
import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from quire.cli.bench.serving_client import Sampling, Server
from quire.cli.bench.serving_load import LoadConversation, LoadRequest, LoadRun, Shape, run_load
from quire.cli.bench.serving_report import COLUMNS, Goal, Numbers, cells, errors, numbers

FIRST_ID = 10  # below are special tokens in many vocabularies
WARM_UP = Shape(rate=2.0)
FINISH_S = 240.0  # after the last arrival


class Length(NamedTuple):
    """Log-normal; sigma 0 is always the median."""

    median: int
    sigma: float
    least: int
    most: int

    def draw(self, random: Random) -> int:
        return min(self.most, max(self.least, round(random.lognormvariate(math.log(self.median), self.sigma))))


class Traffic(NamedTuple):
    prompt: Length  # new tokens of a turn
    answer: Length
    shared_prefix: int  # tokens that all conversations begin with
    turns: int
    vocab: int
    temperature: float

    def conversations(self, seed: str) -> Iterator[LoadConversation]:
        """Without end, the same for the same seed."""
        random = Random(seed)
        prefix = self._tokens(Random("prefix"), self.shared_prefix)
        while True:
            said, conversation = list(prefix), []
            for _ in range(self.turns):
                said += self._tokens(random, self.prompt.draw(random))
                num_answer = self.answer.draw(random)
                conversation.append(LoadRequest(list(said), Sampling(num_answer, self.temperature)))
                said += self._tokens(random, num_answer)
            yield conversation

    def _tokens(self, random: Random, count: int) -> list[int]:
        return [random.randrange(FIRST_ID, self.vocab) for _ in range(count)]


async def run_rates(server: Server, traffic: Traffic, given: argparse.Namespace) -> AsyncIterator[LoadRun]:
    if not server.model:
        await server.find_model()
    warming = traffic.conversations(f"warm-up {given.seed}")
    await run_load(server, WARM_UP, warming, within_s=FINISH_S, arrivals_s=given.warm_up_seconds)
    for rate in given.rates.split(","):
        yield await run_load(
            server, Shape(rate=float(rate)), traffic.conversations(f"{rate} {given.seed}"),
            within_s=given.seconds + FINISH_S, arrivals_s=given.seconds, seed=str(given.seed),
        )  # fmt: skip


def row(name: str, values: list[str]) -> str:
    return f"| {' | '.join([name, *values])} |".replace("\n", " ")


def print_run(name: str, run: LoadRun, goal: Goal) -> Numbers:
    """A row of the table, and the first error of each kind."""
    measured = numbers(run, goal)
    print(row(name, cells(measured)), flush=True)
    for kind, fault in errors(run).items():
        print(f"{kind}, {fault['count']} times: {fault['first'] or ''}", flush=True)
    return measured


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="", help="by default the first that /v1/models lists")
    parser.add_argument("--rates", default="4,12,24", help="conversations per second")
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals, for each rate")
    parser.add_argument("--warm-up-seconds", type=float, default=4.0, help="of arrivals before, not measured")
    parser.add_argument("--prompt-median", type=int, default=500, help="tokens")
    parser.add_argument("--prompt-sigma", type=float, default=1.0)
    parser.add_argument("--prompt-max", type=int, default=4096)
    parser.add_argument("--answer-median", type=int, default=150, help="tokens")
    parser.add_argument("--answer-sigma", type=float, default=0.7)
    parser.add_argument("--answer-max", type=int, default=512)
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens that all conversations begin with")
    parser.add_argument("--turns", type=int, default=1, help="requests of a conversation")
    parser.add_argument("--vocab", type=int, default=32_000, help="token ids are below")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--good-first-token-ms", type=float, default=Goal().first_token_ms)
    parser.add_argument("--good-per-token-ms", type=float, default=Goal().per_token_ms)
    parser.add_argument("--json", help="write the results to this file too")
    return parser.parse_args()


async def main() -> None:
    given = parse()
    prompt = Length(given.prompt_median, given.prompt_sigma, 16, given.prompt_max)
    answer = Length(given.answer_median, given.answer_sigma, 8, given.answer_max)
    traffic = Traffic(prompt, answer, given.shared_prefix, given.turns, given.vocab, given.temperature)
    goal = Goal(given.good_first_token_ms, given.good_per_token_ms)
    server, results = Server(given.url), dict[str, Numbers]()
    server.model = given.model
    print(row("rate", list(COLUMNS)), row("---", ["---:"] * len(COLUMNS)), sep="\n", flush=True)
    async for run in run_rates(server, traffic, given):
        results[run.shape.name] = print_run(run.shape.name, run, goal)
    if given.json:
        document = {"url": given.url, "model": server.model, "options": vars(given), "results": results}
        Path(given.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
