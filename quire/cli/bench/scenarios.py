"""Cases of the bench: prompts of random token ids, and the number of tokens of each answer.

decode_bN        N prompts of 128 tokens: the time of 257 tokens less the time of 1, by 256, is that of one step
prefill_64x2048  64 prompts of 2,048 tokens, one token each
nano256          256 prompts of 100 to 1,024 tokens, answers of 100 to 1,024
long_16x8000     16 prompts of 8,000 tokens, answers of 256
shared_400x4096  400 prompts that begin with the same 4,096 tokens and have 64 of their own, answers of 128
mix1000          1,000 prompts of 16 to 4,096 tokens, answers of 16 to 1,024, short ones as likely as long ones
ttft_L           one prompt of L tokens, one token, once the same has been done for another prompt
start            a process that begins, loads the model and gives one token
"""

import re
from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import NamedTuple

from quire.errors import InvalidSetting

FIRST_ID, END_ID = 10, 100_000  # ids are drawn from here, or up to the end of a smaller vocabulary
DECODE_PROMPT, DECODE_TOKENS = 128, 257
DECODE_ROWS = (1, 8, 32, 64, 128, 256)
TTFT_LENGTHS = (128, 1024, 4096)
NAMES = (
    *(f"decode_b{rows}" for rows in DECODE_ROWS),
    "prefill_64x2048",
    "nano256",
    "long_16x8000",
    "shared_400x4096",
    "mix1000",
    *(f"ttft_{length}" for length in TTFT_LENGTHS),
    "start",
)


class Work(NamedTuple):
    """Prompts to be completed together; answer i has exactly `new_tokens[i]` tokens."""

    prompts: list[list[int]]
    new_tokens: list[int]

    @property
    def longest(self) -> int:
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.new_tokens, strict=True))


def uniform(rows: int, prompt_tokens: int, new_tokens: int, vocab_size: int, seed: int) -> Work:
    """Another seed or shape gives other prompts, so that nothing is found in the prefix cache."""
    random = Random(f"{seed} {rows} {prompt_tokens} {new_tokens}")
    return Work([_ids(random, prompt_tokens, vocab_size) for _ in range(rows)], [new_tokens] * rows)


def nano256(vocab_size: int) -> Work:
    random = Random(0)
    _ids(random, 8 * 64, vocab_size)  # the reference benchmark draws these for its warm-up
    prompts = [_ids(random, random.randint(100, 1024), vocab_size) for _ in range(256)]
    return Work(prompts, [random.randint(100, 1024) for _ in prompts])


def shared(rows: int, length: int, vocab_size: int) -> Work:
    random = Random(f"shared {rows} {length}")
    alike = _ids(random, length, vocab_size)
    return Work([alike + _ids(random, 64, vocab_size) for _ in range(rows)], [128] * rows)


def mix(rows: int, vocab_size: int) -> Work:
    random = Random(f"mix {rows}")
    prompts = [_ids(random, round(2 ** random.uniform(4, 12)), vocab_size) for _ in range(rows)]
    return Work(prompts, [round(2 ** random.uniform(4, 10)) for _ in prompts])


def load(name: str) -> Callable[[int], Work]:
    """A function from the vocabulary's size to the prompts of a case; any case but `start`."""
    if name == "nano256":
        return nano256
    if name == "prefill_64x2048":
        return lambda vocab_size: uniform(64, 2048, 1, vocab_size, seed=2)
    if found := re.fullmatch(r"(decode_b|ttft_|mix)([1-9]\d*)", name):
        kind, count = found[1], int(found[2])
        if kind == "mix":
            return lambda vocab_size: mix(count, vocab_size)
        if kind == "ttft_":
            return lambda vocab_size: uniform(1, count, 1, vocab_size, seed=2)
        return lambda vocab_size: uniform(count, DECODE_PROMPT, DECODE_TOKENS, vocab_size, seed=3)
    if found := re.fullmatch(r"(long|shared)_([1-9]\d*)x([1-9]\d*)", name):
        kind, rows, length = found[1], int(found[2]), int(found[3])
        if kind == "shared":
            return lambda vocab_size: shared(rows, length, vocab_size)
        return lambda vocab_size: uniform(rows, length, 256, vocab_size, seed=2)
    raise InvalidSetting(f"there is no case {name!r}; there are {', '.join(NAMES)}, with any numbers")


def ladder(rows: list[int], prompt_tokens: list[int], new_tokens: list[int]) -> Iterator[tuple[int, int, int]]:
    yield from product(rows, prompt_tokens, new_tokens)


def _ids(random: Random, count: int, vocab_size: int) -> list[int]:
    return [random.randrange(FIRST_ID, min(END_ID, vocab_size)) for _ in range(count)]
