"""Pages in pinned host memory, which a GPU copies from and to by itself, beside its programs.

Pages that go to the host together are in blocks there: arrays of up to 16 pages, one for each stack. A program gathers
pages into blocks on the device (`split`), from where JAX copies them to the host; and JAX copies blocks to the device,
where a program puts the pages that are wanted into place (`place`). Programs that have nothing to do with the copies do
not wait for them, and the host moves no bytes. Arrays are large and few, because each takes time of the host. They
never change. A page that is written is in a new block, so a copy under way is not disturbed.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from quire.executor.host_pages import Fetched, Stack, gather_pages, scatter_pages, stacks_of
from quire.executor.program_order import PINNED_COPY_SIZES
from quire.host_cache_settings import num_spare_pages

log = logging.getLogger(__name__)

PINNED_KINDS = ("split", "place")  # programs for pages on their way to the host and from it
PINNED, DEVICE = "pinned_host", "device"  # kinds of memory, as JAX names them
BLOCK_PAGES = 16  # at most
NUM_STREAMS = 4  # on which XLA begins copies by turns
MAX_SAVING_BYTES = 512 * 2**20  # of blocks on their way to the host, which take up memory of the device meanwhile

BlockArrays = list[jax.Array]  # one for each stack: [pages, arrays, page_size, ...]


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


def memory_of(stack: Stack, kind: str) -> Sharding:
    """The place of some pages of a stack in memory of this kind."""
    if stack.sharding is None:
        return SingleDeviceSharding(jax.local_devices()[0], memory_kind=kind)
    return NamedSharding(stack.sharding.mesh, stack.sharding.spec, memory_kind=kind)


def blocks_like(stacks: Sequence[Stack], num_pages: int) -> list[list[jax.ShapeDtypeStruct]]:
    """The structure of the blocks of `num_pages` on the device."""
    rows = min(num_pages, BLOCK_PAGES)
    block = [
        jax.ShapeDtypeStruct((rows, *one.shape), one.dtype, sharding=memory_of(one, DEVICE))  # type: ignore[no-untyped-call]
        for one in stacks
    ]
    return [block] * (num_pages // rows)


def split_pages(stacks: Sequence[Stack], pages: Any, sources: jax.Array) -> list[BlockArrays]:
    """The contents of some pages, in blocks."""
    gathered, count = gather_pages(stacks, pages, sources), sources.shape[0]
    return [[one[begin : begin + BLOCK_PAGES] for one in gathered] for begin in range(0, count, BLOCK_PAGES)]


def place_pages(
    stacks: Sequence[Stack], pages: Any, targets: jax.Array, blocks: Sequence[BlockArrays]
) -> tuple[Any, jax.Array]:
    """The page arrays with the pages of `blocks` in some of theirs, and a number that is there when they are."""
    stacked = [jnp.concatenate(list(one)) for one in zip(*blocks, strict=True)]
    return scatter_pages(stacks, pages, targets, stacked)


class PinnedBlock:
    """Pages that went to the host together."""

    __slots__ = ("arrays", "num_used", "size")

    def __init__(self, arrays: BlockArrays, size: int) -> None:
        self.arrays = arrays  # in pinned memory
        self.size = size
        self.num_used = 0  # pages of the host that are here

    def result(self) -> None:
        """Nothing to wait for: what reads it waits for it. `take_lost` tells when it has failed."""


class BlockRow(NamedTuple):
    block: PinnedBlock
    row: int


class PinnedPages:
    """The memory of the host tier on GPUs; `HostPages` says what is expected of it. Owned by the engine thread."""

    sizes = PINNED_COPY_SIZES

    def __init__(self, pages: Any, num_pages: int) -> None:
        """`pages`: the structure of the device's page arrays. `num_pages` includes page 0, which is never read."""
        self.stacks = stacks_of(pages)
        self._pinned = [memory_of(stack, PINNED) for stack in self.stacks]
        self._on_device = [memory_of(stack, DEVICE) for stack in self.stacks]
        zeros = [np.zeros((BLOCK_PAGES, *stack.shape), stack.dtype) for stack in self.stacks]
        self._padding = Fetched(np.zeros(BLOCK_PAGES, np.int32), jax.device_put(zeros, self._on_device))
        self._rows: list[BlockRow | None] = [None] * num_pages
        self._blocks: set[PinnedBlock] = set()
        self._num_rows = 0  # of all blocks, used or not
        self._max_rows = num_pages - 1 + num_spare_pages(num_pages - 1, self.page_bytes)
        self._saving: deque[PinnedBlock] = deque()  # those that may be on their way, oldest first
        self._lost: list[int] = []  # pages of those that failed, until they are taken
        self._pinning: Thread | None = None
        self._is_closed = False

    @property
    def page_bytes(self) -> int:
        return sum(stack.num_bytes for stack in self.stacks)

    def pin_all(self) -> None:
        """Pin the memory of all pages from now on, on a thread. The system takes seconds for some gigabytes of it: no
        step is to wait for that. JAX keeps what is freed, for the blocks to come."""
        self._pinning = Thread(target=self._pin_all, name="quire-pin")
        self._pinning.start()

    def _pin_all(self) -> None:
        held: list[BlockArrays] = []
        try:
            while len(held) * BLOCK_PAGES + self._num_rows < self._max_rows and not self._is_closed:
                held.append(jax.block_until_ready(jax.device_put(self._padding.contents, self._pinned)))  # type: ignore[no-untyped-call]
        except Exception as error:  # of any kind: what is missing is pinned when it is needed
            log.warning("host memory is not pinned ahead: %s", str(error).partition("\n")[0])

    def next_save(self, count: int) -> tuple[int, int]:
        """As that of `HostPages`. Three quarters of a block are used at least, so that little memory is wasted."""
        rest = count % BLOCK_PAGES
        whole = min(count if _fills(rest, BLOCK_PAGES) else count - rest, self.sizes[-1])
        if whole:
            return next(size for size in self.sizes if size >= max(whole, BLOCK_PAGES)), whole
        size = next((size for size in self.sizes if _fills(count, size)), 0)
        size = size or max(size for size in self.sizes if size <= count)
        return size, min(count, size)

    def save(
        self, program: Callable[..., Any], pages: Any, sources: np.ndarray[Any, Any], targets: Sequence[int]
    ) -> PinnedBlock:
        size = min(len(sources), BLOCK_PAGES)
        self._wait_for_room(len(sources))
        split = program(pages, sources)[: -(-len(targets) // size)]
        arrays: list[BlockArrays] = jax.device_put(split, [self._pinned] * len(split))
        blocks = [PinnedBlock(one, size) for one in arrays]
        for number, target in enumerate(targets):
            self._enter(target, blocks[number // size], number % size)
        self._saving += blocks
        self._limit_waste()
        return blocks[-1]

    def num_within(self, sources: Sequence[int], max_rows: int, before: Sequence[Fetched] = ()) -> int:
        """As that of `HostPages`. Whole blocks are fetched; a page that is wanted twice, with two of its block."""
        num_rows, times, fetched = 0, Counter[int](), Counter[PinnedBlock]()
        there = {one.block: one.targets for one in before}
        for count, source in enumerate(sources):
            block, row = self._row(source)
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
        there = {one.block: one.targets for one in before}
        again: list[tuple[int, int]] = []  # pages that go to two places
        for source, target in zip(sources, targets, strict=True):
            block, row = self._row(source)
            if _has_room(there, block, row):
                there[block][row] = target
                continue
            places = wanted.setdefault(block, np.zeros(block.size, np.int32))
            if places[row]:
                again.append((source, target))
            else:
                places[row] = target
        blocks = [one.arrays for one in wanted]
        coming: list[BlockArrays] = jax.device_put(blocks, [self._on_device] * len(blocks))
        fetched = [Fetched(*one) for one in zip(wanted.values(), coming, wanted, strict=True)]
        return fetched + (self.fetch(*zip(*again, strict=True)) if again else [])

    def calls(self, fetched: list[Fetched]) -> list[Fetched]:
        """Blocks of the full size are placed by several in a call; what is left of that is padding. Those that arrive
        together are in one call: a stream's blocks follow each other."""
        most = self.sizes[-1] // BLOCK_PAGES
        full = [one for one in fetched if len(one.targets) == BLOCK_PAGES]
        full = [one for stream in range(NUM_STREAMS) for one in full[stream::NUM_STREAMS]]
        calls = [[one] for one in fetched if len(one.targets) < BLOCK_PAGES]
        for begin in range(0, len(full), most):
            group = full[begin : begin + most]
            if 2 * len(group) > most:
                calls.append(group + [self._padding] * (most - len(group)))
            else:
                calls += [[one] for one in group]
        return [
            Fetched(np.concatenate([one.targets for one in call]), [one.contents for one in call]) for call in calls
        ]

    def read(self, pages: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        """The contents of these pages, copied."""
        rows = [self._row(page) for page in pages]
        known: dict[PinnedBlock, list[np.ndarray[Any, Any]]] = {}
        for row in rows:
            if row.block not in known:
                known[row.block] = [np.asarray(one) for one in row.block.arrays]
        found = [(known[row.block], row.row) for row in rows]
        return [np.stack([block[at][row] for block, row in found]) for at in range(len(self.stacks))]

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
        """The pages whose copies from the device have failed since the last call, as far as copies have ended."""
        while self._saving and _has_ended(self._saving[0]):
            self._end_oldest()
        lost, self._lost = [page for page in self._lost if self._rows[page] is None], []
        return lost

    def drain(self) -> None:
        """Nothing arrives late: a page that a failed step wrote is one that no other step reads. Blocks that failed
        are forgotten."""
        while self._saving:
            self._end_oldest()

    def close(self) -> None:
        self._is_closed = True
        if self._pinning is not None:
            self._pinning.join()
        self._saving.clear()
        self._rows.clear()
        self._blocks.clear()

    def _wait_for_room(self, num_pages: int) -> None:
        """Blocks on their way to the host take up memory of the device."""
        most = MAX_SAVING_BYTES // self.page_bytes
        while self._saving and sum(one.size for one in self._saving) + num_pages > most:
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Wait for the oldest block on its way. One that failed is forgotten."""
        block = self._saving.popleft()
        try:
            jax.block_until_ready(block.arrays)  # type: ignore[no-untyped-call]
        except Exception as error:  # of any kind: that of the program which failed
            self._forget(block, error)

    def _row(self, page: int) -> BlockRow:
        row = self._rows[page]
        assert row is not None, f"page {page} of the host was never written"
        return row

    def _pages_of(self, block: PinnedBlock) -> list[int]:
        return [page for page, row in enumerate(self._rows) if row is not None and row.block is block]

    def _enter(self, page: int, block: PinnedBlock, row: int) -> None:
        """`page` is this one from now on."""
        if not block.num_used:
            self._blocks.add(block)
            self._num_rows += block.size
        block.num_used += 1
        before = self._rows[page]
        self._rows[page] = BlockRow(block, row)
        if before is not None:
            before.block.num_used -= 1
            if not before.block.num_used:
                self._blocks.remove(before.block)
                self._num_rows -= before.block.size

    def _forget(self, block: PinnedBlock, error: Exception) -> None:
        """There is nothing in this block: what it was copied from failed."""
        log.warning("%d pages did not reach the host: %s", block.num_used, str(error).partition("\n")[0])
        for page in self._pages_of(block):
            self._rows[page] = None
            self._lost.append(page)
        if block in self._blocks:
            self._blocks.remove(block)
            self._num_rows -= block.size

    def _limit_waste(self) -> None:
        while self._num_rows > self._max_rows and self._repack(min(self._blocks, key=_share_used)):
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
            self._enter(page, PinnedBlock(jax.device_put([one[at : at + 1] for one in contents], self._pinned), 1), 0)
        return True


def _has_room(there: dict[Any, np.ndarray[Any, Any]], block: PinnedBlock, row: int) -> bool:
    """True if the block is on the device, `there`, and its page in this row goes nowhere yet."""
    return block in there and not there[block][row]


def _has_ended(block: PinnedBlock) -> bool:
    arrays: list[Any] = block.arrays
    return all(one.is_deleted() or one.is_ready() for one in arrays)  # one that is deleted cannot be asked


def _fills(count: int, size: int) -> bool:
    return 4 * count >= 3 * size >= 3 * count


def _share_used(block: PinnedBlock) -> float:
    return block.num_used / block.size
