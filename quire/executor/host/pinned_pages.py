"""Pages in pinned host memory, which a GPU copies from and to by itself, beside its programs.

Pages that go to the host together are in blocks there: arrays of up to 16 pages, one for each stack. A program gathers
pages into blocks on the device (`split`), from where JAX copies them to the host; and JAX copies blocks to the device,
where a program puts the pages that are wanted into place (`place`). Programs that have nothing to do with the copies do
not wait for them, and the host moves no bytes. Arrays are large and few, because each takes time of the host. They
never change. A page that is written is in a new block, so a copy under way is not disturbed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from quire.executor.host.block_saves import BlockSaves, PinnedBlock
from quire.executor.host.host_pages import Fetched, HostPages
from quire.executor.host.stacks import (
    BLOCK_PAGES,
    DEVICE,
    PINNED,
    SMALL_BLOCKS,
    SPLIT_SIZES,
    BlockArrays,
    block_pages,
    memory_of,
    place_sizes,
    stacks_of,
)
from quire.settings.host_cache import num_spare_pages

log = logging.getLogger(__name__)

PART_PAGES = SPLIT_SIZES[-1]  # of blocks that are put into place together while others are still coming
MANY_BYTES = 256 * 2**20  # of blocks: they take 5 ms to come, in which the host can make several calls


def can_pin() -> bool:
    """True on GPUs with pinned host memory. A CPU has memory of that kind too, and gains nothing."""
    return jax.default_backend() == "gpu" and pinning_works()


def pinning_works() -> bool:
    """Take a few numbers to pinned memory and back."""
    device = jax.local_devices()[0]
    pinned, on_device = (SingleDeviceSharding(device, memory_kind=kind) for kind in (PINNED, DEVICE))
    try:
        there = jax.device_put(jnp.arange(8) + 1, pinned)
        is_right = bool(np.array_equal(np.asarray(jax.device_put(there, on_device) + 1), np.arange(8) + 2))
    except Exception as error:  # of any kind: another JAX, another device
        log.warning("host memory is not pinned, so that copies are slow: %s", str(error).partition("\n")[0])
        return False
    return is_right and there.sharding.memory_kind == PINNED


class BlockRow(NamedTuple):
    block: PinnedBlock
    row: int


class PinnedPages:
    """The memory of the host tier on GPUs; `HostPages` says what is expected of it. Owned by the engine thread.

    A page that was written is a row of one block. A block whose rows are no page's is forgotten. All blocks have at
    most `max_rows` rows, unless every one of them is full.
    """

    kinds = ("split", "place")

    def __init__(self, pages: Any, num_pages: int) -> None:
        """`pages`: the structure of the device's page arrays. `num_pages` includes page 0, which is never read."""
        self.stacks = stacks_of(pages)
        self._pinned = [memory_of(stack, PINNED) for stack in self.stacks]
        self._on_device = [memory_of(stack, DEVICE) for stack in self.stacks]
        self._padding = {rows: self._empty_block(rows) for rows in (*SMALL_BLOCKS.values(), BLOCK_PAGES)}
        self._rows: list[BlockRow | None] = [None] * num_pages
        self._blocks: set[PinnedBlock] = set()
        self.num_rows = 0  # of all blocks, used or not
        self.max_rows = num_pages - 1 + num_spare_pages(num_pages - 1, self.page_bytes)
        self.saves = BlockSaves(self.page_bytes, self._pinned)
        self._lost: list[int] = []  # pages of those that failed, until they are taken
        self._pinning: Thread | None = None
        self._is_closed = False

    @property
    def page_bytes(self) -> int:
        return sum(stack.num_bytes for stack in self.stacks)

    def pin_all(self) -> Thread:
        """Pin the memory of all pages from now on, on a thread. The system takes seconds for some gigabytes of it: no
        step is to wait for that. JAX keeps what is freed, for the blocks to come."""
        self._pinning = Thread(target=self._pin_all, name="quire-pin")
        self._pinning.start()
        return self._pinning

    def _pin_all(self) -> None:
        held: list[BlockArrays] = []
        try:
            while len(held) * BLOCK_PAGES + self.num_rows < self.max_rows and not self._is_closed:
                held.append(jax.block_until_ready(jax.device_put(self._padding[BLOCK_PAGES].contents, self._pinned)))  # type: ignore[no-untyped-call]
        except Exception as error:  # of any kind: what is missing is pinned when it is needed
            log.warning("host memory is not pinned ahead: %s", str(error).partition("\n")[0])

    def next_save(self, count: int) -> tuple[int, int]:
        """As that of `HostPages`. Three quarters of a block are used at least, so that little memory is wasted."""
        for size in SPLIT_SIZES[::-1]:
            rows = block_pages(size)
            rest = count % rows
            taken = min(count if 4 * rest >= 3 * rows else count - rest, size)
            if taken > (rows if size > BLOCK_PAGES else 0):  # a single block has a smaller program
                return size, taken
        raise AssertionError(f"{count} pages fit no block")

    def save(
        self, program: Callable[..., Any], pages: Any, sources: np.ndarray[Any, Any], targets: Sequence[int]
    ) -> PinnedBlock:
        """As that of `HostPages`. They are gathered on the device; `begin_saves` has them copied."""
        size = block_pages(len(sources))
        self.saves.wait_for_room(len(sources))
        self._forget_failed()
        split: list[BlockArrays] = program(pages, sources)[: -(-len(targets) // size)]
        blocks = [PinnedBlock(arrays, size) for arrays in split]
        for number, target in enumerate(targets):
            self._enter(target, blocks[number // size], number % size)
        self.saves.add(blocks)
        self._limit_waste()
        return blocks[-1]

    def prepare_saves(self, num_pages: int) -> None:
        """So many will be saved: what has to be on the host before begins to be copied. Before pages are fetched, since
        copies follow each other."""
        self.saves.prepare_room(num_pages)

    def begin_saves(self, num_prompt_tokens: int, has_decodes: bool, fetches: bool = False) -> None:
        """As that of `HostPages`: some of what was gathered is copied to the host beside the step."""
        self.saves.begin(num_prompt_tokens, has_decodes, fetches)

    def num_within(self, sources: Sequence[int], max_rows: int, before: Sequence[Fetched] = ()) -> int:
        """As that of `HostPages`. Whole blocks are fetched; a page wanted twice fetches its block twice."""
        blocks = {self.row_of(source).block for source in sources}
        if len(set(sources)) == len(sources) and sum(block.size for block in blocks) <= max_rows:
            return len(sources)
        num_rows, times, fetched = 0, Counter[int](), Counter[PinnedBlock]()
        there = {fetched.block: fetched.targets for fetched in before}
        for count, source in enumerate(sources):
            block, row = self.row_of(source)
            times[source] += 1
            if times[source] > fetched[block] + _has_room(there, block, row):
                fetched[block] += 1
                num_rows += block.size
            if num_rows > max_rows:
                return count
        return len(sources)

    def fetch(self, sources: Sequence[int], targets: Sequence[int], before: Sequence[Fetched] = ()) -> list[Fetched]:
        """As that of `HostPages`. A block of `before` has its other pages on the device too, so it is not fetched again
        for them."""
        wanted: dict[PinnedBlock, np.ndarray[Any, Any]] = {}  # where the pages of each go; 0: nowhere
        there = {fetched.block: fetched.targets for fetched in before}
        again: list[tuple[int, int]] = []  # pages that go to two places
        for source, target in zip(sources, targets, strict=True):
            block, row = self.row_of(source)
            if _has_room(there, block, row):
                there[block][row] = target
                continue
            places = wanted.setdefault(block, np.zeros(block.size, np.int32))
            if places[row]:
                again.append((source, target))
            else:
                places[row] = target
        blocks = [block.arrays for block in wanted]
        # The device copies the first while the host begins with the others.
        parts = [part for part in (blocks[:1], blocks[1:]) if part]
        coming: list[BlockArrays] = [
            arrays for part in parts for arrays in jax.device_put(part, [self._on_device] * len(part))
        ]
        fetched = [Fetched(*parts) for parts in zip(wanted.values(), coming, wanted, strict=True)]
        return fetched + (self.fetch(*zip(*again, strict=True)) if again else [])

    def calls(self, fetched: list[Fetched], num_coming: int = 0) -> list[Fetched]:
        """As few as possible, since each takes time of the host: blocks of a size are placed by several in a call, and
        what is left of that is padding. Many that are on their way are placed as they arrive: then the copies take
        longer than the host."""
        coming = fetched[len(fetched) - num_coming :]
        if sum(len(block.targets) for block in coming) * self.page_bytes < MANY_BYTES:
            return self._calls_of(fetched)
        parts = [fetched[: len(fetched) - num_coming], *in_parts(coming)]
        return [call for part in parts for call in self._calls_of(part)]

    def _calls_of(self, fetched: list[Fetched]) -> list[Fetched]:
        calls: list[Fetched] = []
        for rows in sorted(self._padding):
            sizes = [size for size in place_sizes(self.page_bytes) if block_pages(size) == rows]
            blocks = [block for block in fetched if len(block.targets) == rows]
            most = sizes[-1] // rows
            groups = (blocks[begin : begin + most] for begin in range(0, len(blocks), most))
            calls += [self._call(group, rows, sizes) for group in groups]
        return calls

    def _call(self, blocks: list[Fetched], rows: int, sizes: Sequence[int]) -> Fetched:
        size = next(size for size in sizes if size >= len(blocks) * rows)
        blocks = blocks + [self._padding[rows]] * (size // rows - len(blocks))
        return Fetched(np.concatenate([block.targets for block in blocks]), [block.contents for block in blocks])

    def read(self, pages: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """The contents of these pages, copied."""
        rows = [self.row_of(page) for page in pages]
        copied = {block: [np.asarray(array) for array in block.arrays] for block in {row.block for row in rows}}
        return [np.stack([copied[row.block][at][row.row] for row in rows]) for at in range(len(self.stacks))]

    def write_bytes(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        for page, contents in zip(pages, data, strict=True):
            begin, arrays = 0, []
            for stack in self.stacks:
                part = np.frombuffer(contents[begin : begin + stack.num_bytes], stack.dtype)
                arrays.append(part.reshape(1, *stack.shape).copy())  # it may be read after this call
                begin += stack.num_bytes
            self._enter(page, PinnedBlock(jax.device_put(arrays, self._pinned), 1), 0)
        self._limit_waste()

    def take_lost(self) -> list[int]:
        """As that of `HostPages`. The step that saved them has a result; they are told when the copy has ended."""
        self.saves.note_ended()
        self._forget_failed()
        lost, self._lost = [page for page in self._lost if not self.is_written(page)], []
        return lost

    def drain(self) -> None:
        """Nothing arrives late: a page that a failed step wrote is one that no other step reads. Blocks that failed
        are forgotten."""
        self.saves.drain()
        self._forget_failed()

    def close(self) -> None:
        self._is_closed = True
        if self._pinning is not None:
            self._pinning.join()
        self.saves.clear()
        self._rows.clear()
        self._blocks.clear()

    def _empty_block(self, rows: int) -> Fetched:
        """Padding of calls."""
        zeros = [np.zeros((rows, *stack.shape), stack.dtype) for stack in self.stacks]
        return Fetched(np.zeros(rows, np.int32), jax.device_put(zeros, self._on_device))

    def row_of(self, page: int) -> BlockRow:
        row = self._rows[page]
        assert row is not None, f"page {page} of the host was never written"
        return row

    def is_written(self, page: int) -> bool:
        return self._rows[page] is not None

    def check(self) -> None:
        """Assert what the class promises."""
        used = Counter(row.block for row in self._rows if row is not None)
        assert self._blocks == used.keys(), "a block without pages is kept, or one with pages is not"
        assert all(block.num_used == count for block, count in used.items()), "a block counts other pages than its own"
        assert self.num_rows == sum(block.size for block in self._blocks)
        assert self.num_rows <= self.max_rows or all(block.num_used == block.size for block in self._blocks)

    def _pages_of(self, block: PinnedBlock) -> list[int]:
        return [page for page, row in enumerate(self._rows) if row is not None and row.block is block]

    def _enter(self, page: int, block: PinnedBlock, row: int) -> None:
        """`page` is this one from now on."""
        if not block.num_used:
            self._blocks.add(block)
            self.num_rows += block.size
        block.num_used += 1
        before = self._rows[page]
        self._rows[page] = BlockRow(block, row)
        if before is not None:
            before.block.num_used -= 1
            if not before.block.num_used:
                self._blocks.remove(before.block)
                self.num_rows -= before.block.size

    def _forget_failed(self) -> None:
        while self.saves.failed:
            self._forget(*self.saves.failed.pop())

    def _forget(self, block: PinnedBlock, error: Exception) -> None:
        """There is nothing in this block: what it was copied from failed."""
        if block.num_used:
            log.warning("%d pages did not reach the host: %s", block.num_used, str(error).partition("\n")[0])
        block.num_used = 0
        for page in self._pages_of(block):
            self._rows[page] = None
            self._lost.append(page)
        if block in self._blocks:
            self._blocks.remove(block)
            self.num_rows -= block.size

    def _limit_waste(self) -> None:
        while self.num_rows > self.max_rows and self._repack(min(self._blocks, key=_share_used)):
            pass

    def _repack(self, block: PinnedBlock) -> bool:
        """Give the pages of a block that has few blocks of their own. It takes long, and is rare: pages that go to the
        host together are also forgotten together. False if nothing is gained by it."""
        if block.num_used == block.size:
            return False
        pages = self._pages_of(block)
        try:
            contents = self.read(pages)
        except Exception as error:  # of any kind: that of the program which failed
            self._forget(block, error)
            return True
        for at, page in enumerate(pages):
            self._enter(
                page, PinnedBlock(jax.device_put([array[at : at + 1] for array in contents], self._pinned), 1), 0
            )
        return True


def host_kinds(num_pages: int, is_pinned: bool) -> tuple[str, ...]:
    """The programs that copy pages to the host, where there are so many, and from it."""
    return (PinnedPages if is_pinned else HostPages).kinds if num_pages else ()


def host_memory(kinds: Sequence[str], pages: Any, num_pages: int) -> HostPages | PinnedPages | None:
    """The memory for which there are programs of these kinds, for `num_pages` and page 0; None without any. `pages`:
    the structure of the device's page arrays."""
    if not kinds:
        return None
    if kinds == HostPages.kinds:
        return HostPages(pages, num_pages + 1)
    pinned = PinnedPages(pages, num_pages + 1)
    if jax.default_backend() == "gpu":
        pinned.pin_all()
    return pinned


def in_parts(blocks: Sequence[Fetched]) -> list[list[Fetched]]:
    """Blocks that arrive in this order, as they are put into place together: the last one alone, since all wait for
    it, and before it as many as one call takes quickly."""
    parts: list[list[Fetched]] = [[]]
    num_pages = 0
    for block in reversed(blocks):
        most = BLOCK_PAGES if len(parts) == 1 else PART_PAGES
        if parts[-1] and num_pages + len(block.targets) > most:
            parts.append([])
            num_pages = 0
        parts[-1].append(block)
        num_pages += len(block.targets)
    return [part[::-1] for part in reversed(parts)]


def _has_room(there: dict[Any, np.ndarray[Any, Any]], block: PinnedBlock, row: int) -> bool:
    """True if the block is on the device, `there`, and its page in this row goes nowhere yet."""
    return block in there and not there[block][row]


def _share_used(block: PinnedBlock) -> float:
    return block.num_used / block.size
