"""What it costs to turn streamed tokens into text and search it for stop strings, per token.

    python bench/detokenizer.py MODEL

MODEL is a model folder or a GGUF file; the text is this file, many times over.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from quire.text.detokenizer import Detokenizer
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer, load_tokenizer

NUM_ROUNDS = 5


def detokenize(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join([detokenizer.push((token_id,)) for token_id in ids]) + detokenizer.flush()


def detokenize_and_search(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    stops = StopStrings(["\nUser:", "<|never|>", "Observation:"])
    text = "".join([stops.push(detokenizer.push((token_id,))).text for token_id in ids])
    return text + stops.push(detokenizer.flush()).text + stops.flush().text


def us_per_token(work: Callable[[], object], num_tokens: int) -> float:
    """The best of several rounds: the machine's other work only ever adds."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        work()
        rounds.append(time.perf_counter() - start)
    return min(rounds) / num_tokens * 1e6


def main() -> None:
    tokenizer = load_tokenizer(sys.argv[1])
    text = Path(__file__).read_text(encoding="utf-8")
    emoji = "👩‍🚀 你好 مرحبا ༄༅ " * 20
    for name, sample in (("this file", text * 20), ("characters of several tokens", emoji * 20)):
        ids = tokenizer.encode(sample, add_special_tokens=False)
        plain = us_per_token(lambda ids=ids: detokenize(tokenizer, ids), len(ids))
        searched = us_per_token(lambda ids=ids: detokenize_and_search(tokenizer, ids), len(ids))
        print(f"{name}: {len(ids)} tokens, {plain:.2f} us per token, {searched:.2f} with three stop strings")


if __name__ == "__main__":
    main()
