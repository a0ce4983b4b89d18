"""Chooses the engine of each request, where a server has several."""

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 64
MAX_BLOCKS = 512  # of one prompt: what is alike for 32,768 tokens is taken to be alike
MAX_KNOWN_BLOCKS = 2**16  # of one engine, which take about 10 MB
# An engine is much busier than another from a quarter and 8 sequences more on.
BUSY_FACTOR, BUSY_MARGIN = 1.25, 8.0
ALIKE_SHARE = 0.1  # of the least load: scores this close are equal
PREFILL_TOKENS = 512  # computing this many costs about as much as one more sequence

Blocks = Sequence[int]  # of a prompt, each a hash of all tokens up to its end


def blocks_of(prompt: tuple[int, ...], salt: str) -> Blocks:
    """The whole blocks of a prompt; of a prompt shorter than one, that prompt. The same in every worker: hashes of
    numbers do not depend on the process, as those of texts do."""
    size = min(BLOCK_TOKENS, len(prompt))
    num_blocks = min(len(prompt) // size, MAX_BLOCKS)
    value = zlib.crc32(salt.encode())
    blocks = array("q")
    for start in range(0, num_blocks * size, size):
        value = hash((value, prompt[start : start + size]))
        blocks.append(value)
    return blocks


def weight_of(samples: int, num_prompt: int, num_known: int = 0) -> float:
    """The load of a request: its sequences, and the part of its prompt that is not in a cache."""
    return samples + max(0, num_prompt - num_known * BLOCK_TOKENS) / PREFILL_TOKENS


class KnownBlocks:
    """The blocks that one engine was sent, as its prefix cache may have them: the least recently used go first.

    A block is there only if all blocks before it are: they were used as recently, and go later.
    """

    def __init__(self, max_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def resize(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._evict()

    def clear(self) -> None:
        self._blocks.clear()

    def num_known(self, blocks: Blocks) -> int:
        """The number of leading blocks that are there."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def use(self, blocks: Blocks) -> None:
        known = self._blocks
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        self._evict()

    def _evict(self) -> None:
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


class EngineRouter:
    """Chooses the engine that has the longest prefix of a prompt, unless it is much busier than another.

    An engine's score is the number of the prompt's blocks that it has, less the sequences by which it is busier than
    the least busy one. Engines that are much busier have none. The best score wins. Scores that are nearly equal are
    decided by a hash of the first block that no engine has: HTTP workers that have not heard of each other's prompts
    yet choose alike.

    Knows what engines were sent, not what they have. Has no clock.
    """

    def __init__(self, num_engines: int) -> None:
        self._known = [KnownBlocks() for _ in range(num_engines)]

    def choose(self, blocks: Blocks, loads: Sequence[float | None]) -> int:
        """The engine for a prompt, by the load of each engine; None for one that takes no requests. One must."""
        busy = [load for load in loads if load is not None]
        least = min(busy)
        limit = most_load(least)
        near = [number for number, load in enumerate(loads) if load is not None and load <= limit]
        if len(near) == 1:
            return near[0]
        num_known = {number: self._known[number].num_known(blocks) for number in near}
        scores = {number: num_known[number] - ((loads[number] or 0.0) - least) for number in near}
        enough = max(scores.values()) - ALIKE_SHARE * least
        first_new = blocks[min(max(num_known.values()), len(blocks) - 1)]
        return max(
            (number for number in near if scores[number] >= enough), key=lambda number: hash((first_new, number))
        )

    def num_known(self, number: int, blocks: Blocks) -> int:
        """The blocks of a prompt that an engine may have."""
        return self._known[number].num_known(blocks)

    def sent(self, number: int, blocks: Blocks) -> None:
        """A prompt was sent to an engine, which has its blocks from now on."""
        self._known[number].use(blocks)

    def started(self, number: int, max_blocks: int) -> None:
        """A new engine with an empty cache, which has room for `max_blocks`."""
        self._known[number].clear()
        self._known[number].resize(min(max_blocks, MAX_KNOWN_BLOCKS))


def most_load(least: float) -> float:
    """The load from which on an engine is much busier than one of load `least`."""
    return BUSY_FACTOR * least + BUSY_MARGIN
