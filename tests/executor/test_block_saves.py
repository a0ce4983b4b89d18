"""Blocks on their way to the host: a few are copied in each step, and pages are the same wherever their block is."""

from functools import cache, partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.executor.host import block_saves
from quire.executor.host.block_saves import LONG_STEP_TOKENS, BlockSaves, PinnedBlock
from quire.executor.host.pinned_pages import PinnedPages
from quire.executor.host.stacks import PINNED, memory_of, scatter_blocks, split_pages, stacks_of
from quire.ops.page_moves import PLAIN_MOVES

NUM_PAGES, NUM_HOST_PAGES = 80, 48
LIKE = [jax.ShapeDtypeStruct((NUM_PAGES, 3), "int32") for _ in range(2)]
STACKS = stacks_of(LIKE)
PAGE_BYTES = STACKS[0].num_bytes
(PLACE,) = (memory_of(stack, PINNED) for stack in STACKS)


@cache
def program(kind: str, _size: int) -> Any:
    return jax.jit(partial(split_pages if kind == "split" else scatter_blocks, PLAIN_MOVES, STACKS))


def block_of(size: int, is_used: bool = True) -> PinnedBlock:
    block = PinnedBlock([jax.device_put(np.zeros((size, *STACKS[0].shape), np.int32))], size)
    block.num_used = size * is_used
    return block


def kinds(blocks: list[PinnedBlock]) -> list[str]:
    return [block.arrays[0].sharding.memory_kind for block in blocks]


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> BlockSaves:
    """Room for 128 pages; a step with decodes copies 32, a prompt 48."""
    monkeypatch.setattr(block_saves, "MAX_SAVING_BYTES", 128 * PAGE_BYTES)
    monkeypatch.setattr(block_saves, "STEP_BYTES", 32 * PAGE_BYTES)
    monkeypatch.setattr(block_saves, "PROMPT_BYTES", 48 * PAGE_BYTES)
    return BlockSaves(PAGE_BYTES, [PLACE])


def num_begun(saves: BlockSaves, blocks: list[PinnedBlock]) -> int:
    saves.note_ended()
    return kinds(blocks).count(PINNED)


def test_a_step_with_decodes_copies_little(saves: BlockSaves) -> None:
    blocks = [block_of(16) for _ in range(5)]
    saves.add(blocks)
    counts = []
    for _ in range(4):
        saves.begin(4, True)
        counts.append(num_begun(saves, blocks))
    assert counts == [2, 4, 5, 5]
    saves.drain()
    assert not [*saves]


def test_half_of_the_room_is_left(saves: BlockSaves) -> None:
    for has_decodes in (False, True):  # also between a prompt and its first token
        blocks = [block_of(16) for _ in range(8)]
        saves.add(blocks)
        saves.begin(4, has_decodes)
        assert num_begun(saves, blocks) == 4
        saves.drain()


def test_nothing_is_copied_between_a_prompt_and_its_first_token(saves: BlockSaves) -> None:
    blocks = [block_of(16) for _ in range(7)]
    saves.add(blocks)
    counts = []
    for has_decodes in (False, True, True, False, False):
        saves.begin(4, has_decodes)
        counts.append(num_begun(saves, blocks))
    assert counts == [3, 3, 5, 7, 7]


@pytest.mark.parametrize("has_decodes", [False, True])
def test_a_step_that_fetches_copies_nothing_to_the_host_while_there_is_room(
    saves: BlockSaves, has_decodes: bool
) -> None:
    blocks = [block_of(16) for _ in range(4)]
    saves.add(blocks)
    saves.begin(0, has_decodes, fetches=True)
    assert num_begun(saves, blocks) == 0
    more = [block_of(16) for _ in range(2)]
    saves.add(more)
    saves.begin(0, has_decodes, fetches=True)
    assert num_begun(saves, blocks) == 2, "half of the room is left"
    saves.begin(0, has_decodes)
    assert num_begun(saves, blocks) == 4


def test_a_long_step_copies_all_to_the_host_though_it_fetches(saves: BlockSaves) -> None:
    blocks = [block_of(16) for _ in range(4)]
    saves.add(blocks)
    saves.begin(LONG_STEP_TOKENS - 1, False, fetches=True)
    assert num_begun(saves, blocks) == 0
    saves.begin(LONG_STEP_TOKENS, False, fetches=True)
    assert num_begun(saves, blocks) == 4


@pytest.mark.parametrize("has_decodes", [False, True])
def test_a_long_step_copies_all(saves: BlockSaves, has_decodes: bool) -> None:
    blocks = [block_of(16) for _ in range(8)]
    saves.add(blocks)
    saves.begin(LONG_STEP_TOKENS, has_decodes)
    assert num_begun(saves, blocks) == 8


def test_a_block_larger_than_the_share_of_a_step_is_copied(saves: BlockSaves, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_saves, "STEP_BYTES", PAGE_BYTES)
    blocks = [block_of(16), block_of(16)]
    saves.add(blocks)
    saves.begin(1, True)
    assert num_begun(saves, blocks) == 1


def test_what_nothing_refers_to_is_not_copied(saves: BlockSaves) -> None:
    blocks = [block_of(16, is_used=False), block_of(16), block_of(16), block_of(16)]
    saves.add(blocks)
    saves.begin(1, True)
    assert [kind == PINNED for kind in kinds(blocks)] == [False, True, True, False]


@pytest.mark.parametrize(("num_pages", "begun"), [(16, 0), (32, 0), (33, 1), (48, 1), (64, 2), (128, 6), (200, 6)])
def test_room_is_made_before_it_is_needed(saves: BlockSaves, num_pages: int, begun: int) -> None:
    blocks = [block_of(16) for _ in range(6)]
    saves.add(blocks)
    saves.prepare_room(num_pages)
    assert num_begun(saves, blocks) == begun
    saves.wait_for_room(num_pages)
    assert sum(block.size for block in saves) <= max(0, 128 - num_pages)


@pytest.mark.parametrize("ends", ["drain", "wait_for_room"])
def test_one_that_failed_is_told_and_the_others_are_copied(saves: BlockSaves, ends: str) -> None:
    blocks = [block_of(4) for _ in range(3)]
    saves.add(blocks)
    blocks[1].arrays[0].delete()
    saves.drain() if ends == "drain" else saves.wait_for_room(128)
    assert [block for block, _ in saves.failed] == [blocks[1]]
    assert kinds([blocks[0], blocks[2]]) == [PINNED, PINNED]


class HostMemory(RuleBasedStateMachine):
    """Pages of the host have what was saved last, in any order of calls: gathered, copied, packed, fetched, lost."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            patch.object(block_saves, "MAX_SAVING_BYTES", 64 * PAGE_BYTES),
            patch.object(block_saves, "STEP_BYTES", 8 * PAGE_BYTES),
            patch.object(block_saves, "PROMPT_BYTES", 24 * PAGE_BYTES),
        ]
        for one in self.patches:
            one.start()
        self.host = PinnedPages(LIKE, NUM_HOST_PAGES + 1)
        self.time = 0
        self.expected: dict[int, int] = {}  # by page of the host: its number
        self.lost: set[int] = set()  # pages that may be lost, or are, until they are told
        self.pages: list[Any] = []
        self.write()

    def teardown(self) -> None:
        self.host.close()
        for one in self.patches:
            one.stop()

    def write(self) -> None:
        """Every page of the device gets other numbers."""
        self.time += 1
        self.numbers = 1000 * self.time + np.arange(NUM_PAGES, dtype=np.int32)
        self.pages = [jnp.asarray(np.repeat(self.numbers[:, None], 3, axis=1)) for _ in LIKE]

    @rule(into=st.sets(st.integers(1, NUM_HOST_PAGES), min_size=1), data=st.data())
    def save(self, into: set[int], data: st.DataObject) -> None:
        pages = sorted(into)
        sources = data.draw(st.lists(st.integers(1, NUM_PAGES - 1), min_size=len(pages), max_size=len(pages)))
        begin = 0
        while begin < len(pages):
            size, taken = self.host.next_save(len(pages) - begin)
            padded = np.zeros(size, np.int32)
            padded[:taken] = sources[begin : begin + taken]
            self.host.save(program("split", size), self.pages, padded, pages[begin : begin + taken])
            begin += taken
        self.expected |= {page: int(self.numbers[source]) for page, source in zip(pages, sources, strict=True)}
        self.lost -= into
        self.write()

    @rule(page=st.integers(1, NUM_HOST_PAGES))
    def bring_from_elsewhere(self, page: int) -> None:
        self.time += 1
        self.host.write_bytes([page], [memoryview(np.full((2, 3), self.time, np.int32)).cast("B")])
        self.expected[page] = self.time
        self.lost.discard(page)

    @rule(num_tokens=st.sampled_from([0, 1, LONG_STEP_TOKENS]), has_decodes=st.booleans(), fetches=st.booleans())
    def begin(self, num_tokens: int, has_decodes: bool, fetches: bool) -> None:
        self.host.begin_saves(num_tokens, has_decodes, fetches)

    @rule(num_pages=st.integers(0, 80))
    def prepare(self, num_pages: int) -> None:
        self.host.prepare_saves(num_pages)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """The device fails to fill or to copy a block."""
        if blocks := [*self.host.saves]:
            block = data.draw(st.sampled_from(blocks))
            for array in block.arrays:
                array.delete()
            there = filter(self.host.is_written, self.expected)
            self.lost |= {page for page in there if self.host.row_of(page).block is block}

    @rule()
    def take_lost(self) -> None:
        for page in self.host.take_lost():
            assert page in self.lost, "a page that is there is lost"
            self.lost.discard(page)
            del self.expected[page]

    @rule()
    def reset(self) -> None:
        self.host.drain()
        assert not [*self.host.saves]
        self.take_lost()
        assert not self.lost, "pages are lost, and nobody is told"

    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        there = sorted(set(self.expected) - self.lost)
        if not there:
            return
        sources = data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=NUM_PAGES - 1))
        targets = list(range(1, 1 + len(sources)))
        middle = len(sources) // 2
        fetched = self.host.fetch(sources[:middle], targets[:middle])
        fetched += self.host.fetch(sources[middle:], targets[middle:], fetched)
        pages: Any = self.pages
        for call in self.host.calls(fetched):
            pages, _ = program("place", len(call.targets))(pages, call.targets, call.contents)
        for leaf in pages:
            found = np.asarray(leaf)
            assert found[targets, 0].tolist() == [self.expected[source] for source in sources]
            assert found[len(sources) + 1 :].tolist() == np.asarray(self.pages[0])[len(sources) + 1 :].tolist()

    @invariant()
    def pages_are_the_same(self) -> None:
        there = sorted(set(self.expected) - self.lost)
        if there:
            (found,) = self.host.read(there)
            assert found[:, :, 0].tolist() == [[self.expected[page]] * 2 for page in there]

    @invariant()
    def accounts_are_right(self) -> None:
        self.host.check()
        assert sum(block.size for block in self.host.saves) <= 64


HostMemory.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestHostMemory = HostMemory.TestCase
