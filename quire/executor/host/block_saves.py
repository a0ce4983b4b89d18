"""Blocks of pages in pinned memory of the host, and those on their way there: a few in each step."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import jax
from jax.sharding import Sharding

from quire.executor.host.stacks import BlockArrays

# Of blocks on their way to the host, which take up memory of the device meanwhile. Half of it is what gives way to the
# pages that a step restores at most, so that blocks can wait for a step that restores none.
MAX_SAVING_BYTES = 1024 * 2**20
# Beside decodes: the tokens of the step before come to the host after the blocks that are copied at its end, and the
# host must have them well before the next step ends.
STEP_BYTES = 64 * 2**20
PROMPT_BYTES = 256 * 2**20  # beside a prompt alone, for which no tokens of others wait
LONG_STEP_TOKENS = 512  # of prompts: a step with so many computes for longer than all copies take


class PinnedBlock:
    """Pages that go to the host together."""

    __slots__ = ("arrays", "num_used", "size")

    def __init__(self, arrays: BlockArrays, size: int) -> None:
        self.arrays = arrays  # in pinned memory, or on the device until they are copied there
        self.size = size
        self.num_used = 0  # pages of the host that are here

    def result(self) -> None:
        """Nothing to wait for: what reads it waits for it. `take_lost` tells when it has failed."""

    @property
    def has_ended(self) -> bool:
        """True if its contents are there, or have failed."""
        arrays: list[Any] = self.arrays
        return all(array.is_deleted() or array.is_ready() for array in arrays)  # a deleted array cannot be asked


class BlockSaves:
    """Every block is on the device and waits, or is being copied to pinned memory; together they take at most
    `MAX_SAVING_BYTES` there. The oldest goes first.

    A device copies one thing at a time to the host, and begins with blocks when a step has ended: the tokens of that
    step come after them. A block that waits is read where it is. Owned by the engine thread.
    """

    def __init__(self, page_bytes: int, pinned: list[Sharding]) -> None:
        """`pinned`: the places of a block's arrays."""
        self.failed: list[tuple[PinnedBlock, Exception]] = []  # those that the device could not fill or copy
        self._page_bytes = page_bytes
        self._pinned = pinned
        self._waiting: deque[PinnedBlock] = deque()
        self._copying: deque[PinnedBlock] = deque()
        self._was_prompt = False  # the step before

    def __iter__(self) -> Iterator[PinnedBlock]:
        """All that are not known to have ended."""
        return chain(self._waiting, self._copying)

    def add(self, blocks: Sequence[PinnedBlock]) -> None:
        """A program fills these on the device."""
        self._waiting += blocks

    def begin(self, num_prompt_tokens: int, has_decodes: bool, fetches: bool = False) -> None:
        """A step with so many tokens of prompts is launched next: begin to copy as much as fits well beside it. As long
        as there is room, nothing directly after a prompt, whose first token would come after it, and nothing in a step
        that `fetches` pages from the host, unless it is long: what follows it is late already, since that takes time of
        the host."""
        was_prompt, self._was_prompt = self._was_prompt, num_prompt_tokens > 0 and not has_decodes
        if not self._waiting:
            return
        num_waiting = _num_pages(self._waiting)
        if num_prompt_tokens >= LONG_STEP_TOKENS:
            self._begin(num_waiting)
            return
        most = STEP_BYTES if has_decodes else PROMPT_BYTES
        waits = fetches or (was_prompt and has_decodes)
        num_pages = 0 if waits else max(most // self._page_bytes, self._waiting[0].size)
        # Half of the room is for what the next step adds, which must not wait.
        self._begin(max(num_pages, num_waiting - self._most // 2))

    def prepare_room(self, num_pages: int) -> None:
        """Begin to copy what has to be gone before so many more are added."""
        excess = _num_pages(self) + num_pages - self._most
        missing = excess - _num_pages(self._copying)
        if missing > 0:
            self._begin(missing + max((block.size for block in self._waiting), default=1) - 1)

    def wait_for_room(self, num_pages: int) -> None:
        self.prepare_room(num_pages)
        while self._copying and _num_pages(self) + num_pages > self._most:
            self._end_oldest()

    def note_ended(self) -> None:
        while self._copying and self._copying[0].has_ended:
            self._end_oldest()

    def drain(self) -> None:
        """Wait until all are on the host."""
        self._begin(_num_pages(self._waiting))
        while self._copying:
            self._end_oldest()

    def clear(self) -> None:
        self._waiting.clear()
        self._copying.clear()

    @property
    def _most(self) -> int:
        return MAX_SAVING_BYTES // self._page_bytes

    def _begin(self, num_pages: int) -> None:
        """Those that nothing refers to any more are dropped."""
        blocks: list[PinnedBlock] = []
        while self._waiting and (block := self._waiting[0]).size <= num_pages:
            self._waiting.popleft()
            if block.num_used:
                blocks.append(block)
                num_pages -= block.size
        if blocks:
            self._put(blocks)

    def _put(self, blocks: list[PinnedBlock]) -> None:
        try:
            copies = jax.device_put([block.arrays for block in blocks], [self._pinned] * len(blocks))
        except Exception as error:  # of any kind: that of the program which failed
            if len(blocks) == 1:
                self.failed.append((blocks[0], error))
                return
            for block in blocks:
                self._put([block])
            return
        for block, arrays in zip(blocks, copies, strict=True):
            block.arrays = arrays
        self._copying += blocks

    def _end_oldest(self) -> None:
        """Wait for the oldest that is being copied."""
        block = self._copying.popleft()
        try:
            jax.block_until_ready(block.arrays)  # type: ignore[no-untyped-call]
        except Exception as error:  # as above
            self.failed.append((block, error))


def _num_pages(blocks: Iterable[PinnedBlock]) -> int:
    return sum(block.size for block in blocks)
