"""Tokens per second with guesses, as a ratio to none.

    python bench/speculation.py [--model default] [--quantize int8] [--guesses 7] [--rows 1 8] [--rounds 5]
    python bench/speculation.py --rows 1 --first 0 1 2 3 4 5 6 7     # each prompt alone
    python bench/speculation.py --model MODEL --draft-model SMALLER
    python bench/speculation.py --model random:qwen3-0.6b --quantize none --num-pages 2048     # on a GPU

Two engines in one process, one with guesses and one without, answer the same prompts in turns; the ratios are medians
over the rounds, so that a busy machine disturbs both alike. Prompts are built from files of this repository: edits and
copies of code and text, which answers repeat, and questions that have nothing to do with each other, sampled, which
they do not. The rate is that of all rows together while all of them run. Prompts are in the prefix cache after the
first round, which is not counted. Every answer with guesses is compared with the one without: all are equal where a
row's bits do not depend on its neighbours. A model without a vocabulary gets the bytes of the prompts as its tokens;
its weights are random, so its answers repeat themselves rather than the prompt.
"""

import argparse
import statistics
import time
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

from quire import LLM
from quire.request import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
EDITED = ("quire/core/page_pool.py", "quire/core/deadlines.py", "quire/core/lazy_heap.py", "quire/core/stats.py")
COPIED = ("docs/scheduling.md", "docs/architecture.md", "README.md", "docs/operations/running.md")
QUESTIONS = (
    "Tell me a story about a dragon at sea.", "What would you cook for twelve guests?",
    "Describe a city that was built under a lake.", "Why do people collect stamps?",
    "Write a letter from a lighthouse keeper to the moon.", "Explain how a bicycle stays upright.",
    "Plan a week in the mountains with two children.", "What makes a good teacher?",
)  # fmt: skip


def repeating(count: int, length: int, first: int = 0) -> list[Any]:
    """Chats that ask for a text of theirs again, changed a little."""
    chats = []
    for number in range(first, first + count):
        of_code = number % 2 == 0
        path = (EDITED if of_code else COPIED)[number // 2 % 4]
        text = (ROOT / path).read_text()[:length]
        task = "Write this file again, with a comment above every function" if of_code else "Repeat this text"
        chats.append([{"role": "user", "content": f"{task}:\n\n{text}"}])
    return chats


def unrelated(count: int, first: int = 0) -> list[Any]:
    numbers = range(first, first + count)
    return [[{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}] for number in numbers]


class Runs:
    """The runs of one engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.answers: list[list[int]] = []

    def run(self, prompts: list[Any], sampling: SamplingParams, max_tokens: int) -> float:
        """Tokens per second of all rows together, from the first token of the last row to the first end."""
        self.answers = [[] for _ in prompts]
        begun_s, num_before = 0.0, 0
        settings = {"max_tokens": max_tokens, "seed": 1, "ignore_end": True}
        if self.llm.tokenizer is None:
            prompts = [list(chat[0]["content"].encode()) for chat in prompts]
        with closing(self.llm.stream(prompts, sampling, **settings)) as deltas:
            for delta in deltas:
                self.answers[delta.index] += delta.token_ids
                count = sum(map(len, self.answers))
                if not begun_s and all(self.answers):
                    begun_s, num_before = time.monotonic(), count
                if delta.finish_reason is not None:
                    break
            return (count - num_before) / (time.monotonic() - begun_s)


def compare(plain: Runs, guessing: Runs, prompts: list[Any], sampling: SamplingParams, rounds: int, most: int) -> str:
    counters = guessing.llm.engine.scheduler.counters
    ratios, rates, num_equal = [], [], 0
    for number in range(rounds + 1):
        before = counters.guesses, counters.right_guesses
        order = (plain, guessing) if number % 2 else (guessing, plain)
        rate_of = {runs: runs.run(prompts, sampling, most) for runs in order}
        for one, other in zip(plain.answers, guessing.answers, strict=True):
            length = min(len(one), len(other))
            num_equal += one[:length] == other[:length]
        if number:
            ratios.append(rate_of[guessing] / rate_of[plain])
            rates.append(rate_of[plain])
        made, right = counters.guesses - before[0], counters.right_guesses - before[1]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    accepted = f"{right} of {made} guesses right" if made else "no guesses"
    equal = f"{num_equal} of {(rounds + 1) * len(prompts)} answers equal"
    rate = f"{statistics.median(ratios):.2f}x ({spread}) of {statistics.median(rates):.0f} tokens/s"
    return f"{rate}; {accepted}; {equal}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft-model", default=None)
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--guesses", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--length", type=int, default=1600, help="Characters of a text that is repeated.")
    parser.add_argument("--first", type=int, nargs="+", default=[0], help="Numbers of the first prompt, one run each.")
    parser.add_argument("--num-pages", type=int, default=None, help="of each engine, where they share a device")
    asked = parser.parse_args()
    settings: dict[str, Any] = {
        "quantize": asked.quantize, "max_batch_size": 8, "max_total_tokens": 2048, "progress": False,
        "num_pages": asked.num_pages,
    }  # fmt: skip
    drafts = {} if asked.draft_model is None else {"draft_model": asked.draft_model}
    plain = Runs(LLM(asked.model, **settings))
    guessing = Runs(LLM(asked.model, speculate=asked.guesses, **drafts, **settings))
    greedy, sampled = SamplingParams(temperature=0), SamplingParams(temperature=0.8)
    for rows, first in product(asked.rows, asked.first):
        for name, prompts, sampling in (
            ("repeating", repeating(rows, asked.length, first), greedy),
            ("unrelated", unrelated(rows, first), sampled),
        ):
            found = compare(plain, guessing, prompts, sampling, asked.rounds, asked.tokens)
            of = f" from {first}" if first else ""
            print(f"{asked.quantize} {rows} rows{of}, {name}: {found}", flush=True)


if __name__ == "__main__":
    main()
