"""Copies of pages run in their order, and pages from the host beside the chunks that do not need them."""

from typing import Any

import pytest

from quire.core.plan import Chunk, Kind, PageCopy, Place, StepResult, Tier, device_copy
from quire.executor.host import page_copies
from quire.executor.host.page_copies import arrange, independent
from tests.executor.conftest import HOST_PAGES
from tests.executor.rig import Rig
from tests.executor.sampling import slot_start
from tests.executor.test_host_pages import host_copies, two_turns
from tests.executor.test_schedules import check
from tests.executor.workload import GREEDY
from tests.fake_executor import plan_of


def restore(host: int, device: int) -> PageCopy:
    return PageCopy(Place(Tier.HOST, host), Place(Tier.DEVICE, device))


def save(device: int, host: int) -> PageCopy:
    return PageCopy(Place(Tier.DEVICE, device), Place(Tier.HOST, host))


def test_pages_from_the_host_come_last() -> None:
    copies = [save(5, 9), restore(1, 5), device_copy(7, 8), restore(2, 6)]
    assert arrange(copies) == ([copies[0], copies[2]], [copies[1], copies[3]])


def test_a_copy_is_not_moved_past_one_that_uses_its_pages() -> None:
    for later in (device_copy(5, 8), device_copy(8, 5), save(8, 1), save(5, 9)):
        copies = [restore(1, 5), later]
        assert arrange(copies) == (copies, []), later
    copies = [save(8, 1), restore(1, 5)]
    assert arrange(copies) == (copies, [])


def test_a_run_ends_where_a_page_is_written_that_it_uses() -> None:
    copies = [device_copy(1, 2), device_copy(1, 3), device_copy(3, 4), save(4, 1), save(5, 2), device_copy(6, 7)]
    assert [len(run) for run in independent(copies)] == [2, 1, 2, 1]


class Talk:
    """A prompt of four pages, computed in pages 3 to 6 and saved to the host's 1 to 4, and another that decodes."""

    def __init__(self, rig: Rig) -> None:
        self.executor, size = rig.executor, rig.shapes.page_size
        self.prompt = tuple(range(20, 20 + 4 * size))
        self.executor.reset()
        first = Chunk(0, 0, 0, 0, Kind.PREFILL, 0, 4 * size, ((3, 4, 5, 6),), True)
        self.expected = self.run((first,), started=(slot_start(GREEDY, prompt=self.prompt),)).tokens[0]
        self.run(copies=host_copies({3: 1, 4: 2, 5: 3, 6: 4}, to_host=True))
        self.contents = {page: self.executor.read_pages([page])() for page in (3, 4, 5, 6)}
        begun = Chunk(1, 0, 0, 1, Kind.PREFILL, 0, 2 * size - 3, ((13, 14),), True)
        self.run((begun,), started=(slot_start(GREEDY, slot=1, prompt=self.prompt[: 2 * size - 3]),))
        self.decode = Chunk(1, 0, 0, 1, Kind.DECODE, 2 * size - 3, 1, (), True)
        self.last = Chunk(2, 0, 0, 2, Kind.PREFILL, 4 * size - 1, 1, ((4, 3, 6, 5),), True)
        self.started = (slot_start(GREEDY, slot=2, prompt=self.prompt),)

    def run(self, chunks: tuple[Chunk, ...] = (), copies: tuple[PageCopy, ...] = (), **others: Any) -> StepResult:
        return self.executor.submit(plan_of(1, chunks, copies=copies, **others)).result()

    def run_decode(self, copies: tuple[PageCopy, ...]) -> None:
        self.run((self.decode,), copies)
        self.decode = self.decode._replace(start=self.decode.start + 1)

    @property
    def num_awaited(self) -> int:
        return self.executor.copies.num_awaited


def test_pages_come_from_the_host_beside_a_decode(any_llama: Rig) -> None:
    """They go to where pages of an earlier sequence were, which the same step saves, and are in their places when the
    step that computes with them has its last."""
    talk = Talk(any_llama)
    saved = host_copies({3: 31, 4: 32, 5: 33, 6: 34}, to_host=True)
    talk.run_decode((*saved, *host_copies({4: 1, 3: 2}, to_host=False)))
    assert talk.num_awaited == 2
    talk.run_decode(host_copies({6: 3}, to_host=False))
    assert talk.num_awaited == 3
    result = talk.run((talk.decode, talk.last), host_copies({5: 4}, to_host=False), started=talk.started)
    assert talk.num_awaited == 0
    assert result.tokens[1] == talk.expected


def test_a_chunk_does_not_wait_for_pages_that_others_will_read(any_llama: Rig) -> None:
    """They come from the host in the same step, or came in one before, and stay on their way."""
    talk = Talk(any_llama)
    talk.run_decode((*host_copies({4: 1, 3: 2}, to_host=False),))
    talk.run_decode(host_copies({6: 3, 5: 4}, to_host=False))
    others = host_copies({50: 1, 51: 2}, to_host=False)
    result = talk.run((talk.decode, talk.last), others, started=talk.started)
    assert result.tokens[1] == talk.expected
    assert talk.num_awaited == 2
    assert [talk.executor.read_pages([page])() for page in (50, 51)] == [talk.contents[page] for page in (3, 4)]
    assert talk.num_awaited == 0


def test_pages_from_the_host_are_in_their_places_when_they_are_used(any_llama: Rig) -> None:
    """By another copy: within the device, to the host, or of another page of the host to the same page."""
    talk = Talk(any_llama)
    talk.run_decode(host_copies({4: 1}, to_host=False))
    talk.run_decode((device_copy(4, 40),))
    talk.run_decode(host_copies({40: 4}, to_host=False))
    talk.run_decode(host_copies({40: 30}, to_host=True))
    talk.run_decode(host_copies({50: 30, 51: 1}, to_host=False))
    talk.run_decode(host_copies({51: 2}, to_host=False))
    assert talk.num_awaited == 1
    found = [talk.executor.read_pages([page])() for page in (4, 40, 50, 51)]
    assert found == [talk.contents[page] for page in (3, 6, 6, 4)]


def test_pages_that_wait_for_their_use_take_little_memory(any_llama: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before are put into place, so that there is memory for the next ones."""
    talk = Talk(any_llama)
    host = talk.executor.host_pages
    assert host is not None
    monkeypatch.setattr(page_copies, "MAX_UNPLACED_BYTES", 4 * host.page_bytes)
    talk.run_decode(host_copies({40: 1, 41: 2}, to_host=False))
    assert talk.num_awaited == 2
    talk.run_decode(host_copies({42: 1}, to_host=False))
    assert talk.num_awaited == 1
    assert [talk.executor.read_pages([page])() for page in (40, 41, 42)] == [talk.contents[page] for page in (3, 4, 3)]


@pytest.mark.parametrize(
    ("max_rows", "count"), [(-4, 0), (0, 0), (1, 1), (5, 4), (15, 4), (16, 16), (47, 32), (99, 40)]
)
def test_pages_are_fetched_in_as_many_rows_as_there_is_memory_for(llama: Rig, max_rows: int, count: int) -> None:
    host = llama.executor.host_pages
    assert host is not None
    assert host.num_within(range(1, 41), max_rows) == count
    fetched = host.fetch(range(1, 1 + count), range(1, 1 + count))
    assert sum(len(one.targets) for one in fetched) <= max(0, max_rows)


def test_a_reset_forgets_pages_that_were_on_their_way(any_llama: Rig) -> None:
    talk = Talk(any_llama)
    talk.run_decode(host_copies({40: 1}, to_host=False))
    talk.executor.reset()
    assert talk.num_awaited == 0
    assert not any(talk.executor.read_pages([40])())


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_second_turns_that_run_together_restore_beside_each_other(any_llama: Rig, lookahead: int) -> None:
    """While some decode the pages of others come from the host, a few in a step."""
    settings: dict[str, Any] = {"max_batch_size": 4, "num_pages": 70, "host_pages": HOST_PAGES, "max_page_restores": 3}
    engine, second, run = two_turns(any_llama, lookahead=lookahead, **settings)
    assert check(any_llama, second, run) <= 1
    stats = engine.scheduler.stats()
    assert stats.restored_pages > len(second)
    assert stats.saved_pages > 70
