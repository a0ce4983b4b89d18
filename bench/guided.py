"""Cost of grammars: the time of a mask, and decoding with no row guided, all guided, and all guided without forcing.

python bench/guided.py [--rounds 3] [--tokens 48] [--rows 8] [--model default]
"""

import argparse
import dataclasses
import statistics
import time

from quire import LLM, SamplingParams, json_schema
from quire.engine.grammar_masks import Guided
from quire.grammar.matcher import Grammars
from quire.request import Grammar

WAIT_S = 10.0
# Its answers are longer than what is asked for, so that all have the same number of tokens.
SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "home_city": {"type": "string", "maxLength": 20},
            "is_active": {"type": "boolean"},
        },
        "required": ["name", "age", "home_city", "is_active"],
    },
}
PROMPT = "Here is a list of people, as JSON, each with a name, an age and a city:\n"


def mask_costs(llm: LLM, grammar: Grammar, tokens: list[int]) -> None:
    """Of the answer `tokens`, as the engine computes them: on a pool's thread, the result awaited."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    grammars = Grammars(lambda: tokenizer, llm.deployment.files.eos_token_ids, llm.deployment.model.vocab_size)
    begun = time.perf_counter()
    grammars.matcher(grammar)
    first_s = time.perf_counter() - begun
    cold, warm = ([_walk_us(grammars, grammar, tokens) for _ in range(count)] for count in (1, 5))
    print(f"tokenizer and grammar compiled: {first_s:.3f} s")
    flat = sorted(cost for walk in warm for cost in walk)
    high = flat[len(flat) * 99 // 100]
    print(f"a token taken in and its mask: median {statistics.median(flat):.0f} µs, 99th percentile {high:.0f}")
    print(f"in a grammar's first answer: median {statistics.median(cold[0]):.0f} µs, highest {max(cold[0]):.0f}")


def _walk_us(grammars: Grammars, grammar: Grammar, tokens: list[int]) -> list[float]:
    """Of each token that is sampled; those that are forced come with the one before them."""
    guided = Guided(grammars.matcher(grammar), 0, ())
    guided.mask(0, WAIT_S)
    costs = []
    for number, token in enumerate(tokens, start=1):
        is_forced = bool(guided.forced())
        begun = time.perf_counter()
        guided.append([token])
        guided.mask(number, WAIT_S)
        if not is_forced:
            costs.append((time.perf_counter() - begun) * 1e6)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--model", default="default")
    asked = parser.parse_args()
    llm = LLM(asked.model, progress=False, compile_ahead=False, max_batch_size=asked.rows, max_total_tokens=2048)
    scheduler = llm.engine.scheduler
    grammar = json_schema(SCHEMA)
    free = SamplingParams(temperature=1.0)
    prompts = [f"{number}. {PROMPT}" for number in range(asked.rows)]
    ways: dict[str, dict[str, object]] = {
        "free": {"ignore_end": True},
        "guided": {"grammar": grammar},
        "guided, tokens one by one": {"grammar": grammar},
    }
    steps: dict[str, int] = {}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    answer: list[int] = []
    for round_number in range(asked.rounds + 1):
        for name, how in ways.items():
            scheduler.limits = dataclasses.replace(scheduler.limits, forces_tokens="one by one" not in name)
            num_steps = -scheduler.counters.steps
            begun = time.perf_counter()
            done = llm.generate(prompts, free, max_tokens=asked.tokens, seed=1, **how)  # type: ignore[arg-type]
            took_s = time.perf_counter() - begun
            steps[name] = num_steps + scheduler.counters.steps
            assert all(len(one.token_ids) == asked.tokens for one in done)
            if round_number:  # the first compiles and fills the cache of prompts
                speeds[name].append(asked.rows * asked.tokens / took_s)
            if "grammar" in how:
                answer = done[0].token_ids
    for name, values in speeds.items():
        shown = ", ".join(f"{value:.1f}" for value in values)
        print(f"{name}: {statistics.median(values):.1f} tokens/s ({shown}), {steps[name]} steps")
    mask_costs(llm, grammar, answer)
    llm.close()


if __name__ == "__main__":
    main()
