"""Pages in pinned memory of the host: they are the same there, and what was on the host stays while it is read."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.core.plan import Chunk, Kind, StepPlan, device_copy
from quire.executor.executor import JaxExecutor
from quire.executor.host import block_saves, page_copies, pinned_pages
from quire.executor.host.block_saves import PinnedBlock
from quire.executor.host.host_pages import Fetched
from quire.executor.host.pinned_pages import PinnedPages, can_pin, pinning_works
from quire.executor.host.stacks import DEVICE, MAX_UNPLACED_BYTES, PINNED, place_sizes
from quire.executor.memory import reserve_device_memory
from quire.executor.pending import Pending
from quire.executor.programs.catalog import Catalog
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.store import ProgramStore
from quire.models.checkpoint import load_weights
from quire.models.registry import build_model
from quire.settings.config import Config
from quire.settings.host_cache import resolve_host_cache
from tests.executor.conftest import SHAPES, config_of
from tests.executor.rig import NamedTensors, executor_of
from tests.executor.test_host_pages import host_copies
from tests.fake_executor import plan_of


def stored(folder: Path) -> JaxExecutor:
    model = build_model(config_of("llama", num_hidden_layers=1))
    weights = load_weights(model, NamedTensors(model), dtype="bfloat16")
    store = ProgramStore(folder, "pinned")
    return executor_of(model, weights, SHAPES, threads=1, store=store, num_host_pages=80, pins_host_pages=True)


@pytest.fixture
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JaxExecutor]:
    """With numbers in its pages."""
    made = stored(tmp_path_factory.getbasetemp() / "pinned")
    fill(made)
    yield made
    made.close()


def pinned(executor: JaxExecutor) -> PinnedPages:
    assert isinstance(executor.host_pages, PinnedPages)
    return executor.host_pages


def contents_of(executor: JaxExecutor, page: int) -> bytes:
    return b"".join(one.tobytes() for one in pinned(executor).read([page]))


def memory_kinds(block: PinnedBlock) -> set[str]:
    return {array.sharding.memory_kind for array in block.arrays}


def blocks_of(host: PinnedPages, pages: Iterable[int]) -> set[PinnedBlock]:
    return {host.row_of(page).block for page in pages}


def fill(executor: JaxExecutor) -> None:
    """Every page has other numbers."""
    rng = np.random.default_rng(3)
    pages = executor.state.pages
    filled = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 1, leaf.shape).astype(leaf.dtype)), pages)
    executor.state = executor.state._replace(pages=filled)


def test_pages_are_the_same_after_they_were_pinned_also_with_kept_programs(tmp_path: Path) -> None:
    for _ in range(2):  # the second one loads the programs of the first
        executor = stored(tmp_path)
        fill(executor)
        first, second = executor.read_pages([3])(), executor.read_pages([4])()
        assert first != second
        executor.submit(plan_of(1, (), copies=host_copies({3: 2}, to_host=True))).result()
        assert memory_kinds(pinned(executor).row_of(2).block) == {PINNED}
        both = host_copies({11: 2}, to_host=False) + host_copies({4: 2}, to_host=True)  # read, then written
        executor.submit(plan_of(2, (), copies=both)).result()
        assert executor.read_pages([11])() == first
        assert contents_of(executor, 2) == second
        executor.reset()
        executor.submit(plan_of(3, (), copies=host_copies({12: 2}, to_host=False))).result()
        assert executor.read_pages([12])() == second, "pages of the host survive a reset"
        executor.close()


def test_pinning_is_tried_before_it_is_used() -> None:
    assert pinning_works()
    assert not can_pin(), "a CPU gains nothing"


@pytest.mark.parametrize(
    ("count", "calls"),
    [
        (1, [(2, 1)]),
        (2, [(2, 2)]),
        (3, [(12, 3)]),
        (5, [(12, 4), (2, 1)]),
        (10, [(12, 8), (2, 2)]),
        (11, [(12, 11)]),
        (12, [(16, 12)]),
        (16, [(16, 16)]),
        (20, [(16, 16), (12, 4)]),
        (40, [(64, 32), (12, 8)]),
        (61, [(64, 61)]),
        (80, [(64, 64), (16, 16)]),
        (125, [(64, 64), (64, 61)]),
    ],
)
def test_blocks_are_filled_so_that_little_memory_is_wasted(
    executor: JaxExecutor, count: int, calls: list[tuple[int, int]]
) -> None:
    made = []
    while count:
        made.append(pinned(executor).next_save(count))
        count -= made[-1][1]
    assert made == calls


def test_few_pages_are_on_their_way_to_the_host_at_once(executor: JaxExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take up memory of the device, which is not to run out."""
    monkeypatch.setattr(block_saves, "MAX_SAVING_BYTES", 1)
    host = pinned(executor)
    for begin in (3, 5):
        executor.submit(plan_of(1, (), copies=host_copies({begin: begin, begin + 1: begin + 1}, to_host=True)))
        assert len([*host.saves]) == 2  # blocks of a page
    assert contents_of(executor, 4) == executor.read_pages([4])()
    executor.reset()
    assert not [*host.saves]


def test_memory_for_all_pages_can_be_pinned_before_they_come(
    executor: JaxExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = pinned(executor), []
    put = jax.device_put

    def watched(arrays: list[jax.Array], where: list[jax.sharding.Sharding]) -> list[jax.Array]:
        assert {one.memory_kind for one in where} == {PINNED}
        made.append(len(arrays[0]))
        if len(made) > 6:
            raise RuntimeError("no more")
        return put(arrays, where)

    monkeypatch.setattr(pinned_pages.jax, "device_put", watched)
    host.pin_all().join()
    assert sum(made) == 96 >= host.max_rows > 80
    assert not caplog.records
    host.pin_all().join()
    assert "not pinned ahead: no more" in caplog.text


def test_no_more_memory_is_pinned_beside_pages_that_have_come(
    executor: JaxExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, made = pinned(executor), []
    save_pages(executor, range(1, 65))
    monkeypatch.setattr(pinned_pages.jax, "device_put", lambda arrays, where: made.append(len(arrays[0])))
    host.pin_all().join()
    assert host.num_rows == 64
    assert sum(made) == 32 >= host.max_rows - 64


def call_sizes(host: PinnedPages, pages: dict[int, int]) -> list[int]:
    """By device page: the host page."""
    return [len(call.targets) for call in host.calls(host.fetch(list(pages.values()), list(pages)))]


def test_a_call_takes_several_blocks_and_leaves_what_is_not_wanted(executor: JaxExecutor) -> None:
    """61 pages in four blocks, of which pages are restored to other places; some twice, and most of them not."""
    host = pinned(executor)
    saved = {page: 62 - page for page in range(1, 62)}
    before = {page: executor.read_pages([page])() for page in range(1, 80)}
    executor.submit(plan_of(1, (), copies=host_copies(saved, to_host=True))).result()
    assert len(blocks_of(host, range(1, 62))) == 4
    restored = {70: 3, 71: 18, 72: 35, 73: 50, 74: 50, 75: 61}
    assert call_sizes(host, restored) == [192]
    executor.submit(plan_of(2, (), copies=host_copies(restored, to_host=False))).result()
    for page in range(1, 80):
        expected = before[62 - restored[page]] if page in restored else before[page]
        assert executor.read_pages([page])() == expected, page
    assert call_sizes(host, {70: 3, 71: 18}) == [64]
    assert call_sizes(host, {70: 3}) == [16]


def test_blocks_of_which_little_is_used_are_packed(executor: JaxExecutor) -> None:
    host = pinned(executor)
    host.max_rows = 64
    executor.submit(plan_of(1, (), copies=host_copies({page: page for page in range(1, 49)}, to_host=True))).result()
    assert host.num_rows == 48
    expected = {page: executor.read_pages([page])() for page in range(1, 50)}
    for begin in (1, 17, 33):  # but one page of each block
        others = {49: begin + 1}, {page: page for page in range(begin + 2, begin + 16)}
        for part in others:
            executor.submit(plan_of(2, (), copies=host_copies(part, to_host=True))).result()
    assert host.num_rows <= 64
    host.check()
    for page in range(1, 49):
        assert contents_of(executor, page) == expected[49 if page in (2, 18, 34) else page], page


def rows_on_device(host: PinnedPages) -> int:
    """Of all blocks there."""
    shape = host.stacks[0].shape
    arrays = [one for one in jax.live_arrays() if one.shape[1:] == shape and one.sharding.memory_kind == DEVICE]
    return sum(len(one) for one in arrays)


def test_blocks_of_which_few_pages_are_wanted_take_little_memory_of_the_device(
    executor: JaxExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks are on the device, and not longer than it takes to put their pages into place."""
    host = pinned(executor)
    before = {page: executor.read_pages([page])() for page in range(1, 65)}
    executor.submit(plan_of(1, (), copies=host_copies({page: page for page in range(1, 65)}, to_host=True))).result()
    host.drain()
    always, most = rows_on_device(host), []
    fetch = host.fetch

    def watched(sources: Sequence[int], targets: Sequence[int], before: Sequence[Fetched]) -> list[Fetched]:
        fetched = fetch(sources, targets, before)
        most.append(rows_on_device(host) - always)
        return fetched

    monkeypatch.setattr(host, "fetch", watched)
    monkeypatch.setattr(page_copies, "MAX_UNPLACED_BYTES", 32 * host.page_bytes)
    restored = {70: 1, 71: 2, 72: 18, 73: 35, 74: 50, 75: 50}
    pending = executor.submit(plan_of(2, (), copies=host_copies(restored, to_host=False)))
    assert most == [32, 32, 16]
    assert rows_on_device(host) == always, "a step that is not collected has none"
    pending.result()
    # In order: a later copy uses the pages.
    copies = (*host_copies(restored, to_host=False), *(device_copy(page, page + 6) for page in restored))
    executor.submit(plan_of(3, (), copies=copies)).result()
    assert most == [32, 32, 16] * 2
    for page, source in restored.items():
        assert executor.read_pages([page])() == executor.read_pages([page + 6])() == before[source], page


def test_a_block_whose_pages_are_restored_by_several_steps_is_fetched_once(executor: JaxExecutor) -> None:
    """Also where there is no room for it a second time. A page that is wanted again is fetched again."""
    host = pinned(executor)
    before = {page: executor.read_pages([page])() for page in range(1, 33)}
    executor.submit(plan_of(1, (), copies=host_copies({page: page for page in range(1, 33)}, to_host=True))).result()
    first = host.fetch([1, 2, 18], [40, 41, 42])
    assert [len(one.targets) for one in first] == [16, 16]
    assert host.num_within([3, 19, 20, 1, 4], 0, first) == 3
    assert host.num_within([3, 19, 20, 1, 4], 16, first) == 5
    assert host.fetch([3, 19, 20], [43, 44, 45], first) == []
    again = host.fetch([4, 1, 1], [46, 47, 48], first)
    assert [one.targets.nonzero()[0].tolist() for one in again] == [[0], [0]]
    assert first[0].targets.tolist()[:4] == [40, 41, 43, 46]
    pages = executor.state.pages
    for call in host.calls(first + again):
        pages, _ = executor.programs.get(("place", len(call.targets)))(pages, call.targets, call.contents)
    executor.state = executor.state._replace(pages=pages)
    placed = {40: 1, 41: 2, 42: 18, 43: 3, 44: 19, 45: 20, 46: 4, 47: 1, 48: 1}
    assert all(executor.read_pages([page])() == before[source] for page, source in placed.items())


def test_a_page_is_read_before_it_is_restored_beside_copies_in_order(executor: JaxExecutor) -> None:
    """The block of the restore is on the device, and not in its place."""
    save_pages(executor, range(1, 17))
    before = {page: executor.read_pages([page])() for page in range(1, 40)}
    decode = Chunk(1, 0, 0, 0, Kind.DECODE, 5, 1, (), True)
    begin_copies(executor, plan_of(2, (decode,), copies=host_copies({30: 1}, to_host=False)))
    saved = host_copies({5: 40}, to_host=True) + host_copies({31: 40}, to_host=False)
    copies = (*saved, device_copy(32, 33), *host_copies({32: 2}, to_host=False))
    executor.submit(plan_of(3, (), copies=copies)).result()
    for page, source in {30: 1, 31: 5, 33: 32, 32: 2}.items():
        assert executor.read_pages([page])() == before[source], page


def test_a_step_that_fetches_leaves_what_it_gathers_to_the_next(executor: JaxExecutor) -> None:
    save_pages(executor, range(1, 17))
    before = executor.read_pages([20])()
    decode = Chunk(1, 0, 0, 0, Kind.DECODE, 5, 1, (), True)
    copies = host_copies({20: 40}, to_host=True) + host_copies({30: 1}, to_host=False)
    for step, (moved, kind) in enumerate(((copies, DEVICE), ((), PINNED)), start=2):
        begin_copies(executor, plan_of(step, (decode,), copies=tuple(moved)))
        assert memory_kinds(pinned(executor).row_of(40).block) == {kind}, step
    assert contents_of(executor, 40) == before


def begin_copies(executor: JaxExecutor, plan: StepPlan) -> None:
    """Those of a plan alone, without its chunks."""
    pages, _ = executor.copies.begin(executor.state.pages, plan)
    executor.state = executor.state._replace(pages=pages)


def begin_save(executor: JaxExecutor, pages: range) -> tuple[Pending, PinnedBlock]:
    """Each to its own number; also the block of the last."""
    copies = host_copies({page: page for page in pages}, to_host=True)
    pending = executor.submit(plan_of(1, (), copies=copies))
    return pending, pinned(executor).row_of(pages[-1]).block


def save_pages(executor: JaxExecutor, pages: range) -> PinnedBlock:
    pending, block = begin_save(executor, pages)
    pending.result()
    return block


def lose(block: PinnedBlock) -> None:
    """Whatever waits for it or reads it raises an error, as after a failed program."""
    for one in block.arrays:
        one.delete()


@pytest.mark.parametrize("waits", [False, True])
def test_a_reset_forgets_blocks_that_failed(
    executor: JaxExecutor, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = pinned(executor)
    save_pages(executor, range(1, 17))
    blocks = [begin_save(executor, pages)[1] for pages in (range(17, 33), range(33, 37), range(33, 37))]
    for one in blocks[:2]:  # the second is overwritten
        lose(one)
    if waits:
        monkeypatch.setattr(block_saves, "MAX_SAVING_BYTES", 1)
        begin_save(executor, range(33, 37))
    executor.reset()
    fill(executor)
    assert [*filter(host.is_written, range(81))] == [*range(1, 17), *range(33, 37)]
    assert host.num_rows == 20
    host.check()
    save_pages(executor, range(17, 33))
    assert contents_of(executor, 20) == executor.read_pages([20])()


def test_a_copy_that_failed_is_told_once_when_it_has_ended(executor: JaxExecutor) -> None:
    """The step has a result: the copy alone failed."""
    save_pages(executor, range(1, 17))
    pending, failed = begin_save(executor, range(17, 33))
    _, overwritten = begin_save(executor, range(33, 37))
    for one in (failed, overwritten):
        lose(one)
    later, _ = begin_save(executor, range(33, 37))
    assert pending.result().lost_pages == tuple(range(17, 33))
    assert later.result().lost_pages == ()
    host = pinned(executor)
    assert not blocks_of(host, filter(host.is_written, range(81))) & {failed, overwritten}
    host.check()


def test_a_block_that_failed_is_not_packed_again_and_again(executor: JaxExecutor) -> None:
    host = pinned(executor)
    failed = save_pages(executor, range(1, 17))
    save_pages(executor, range(1, 13))  # in blocks of their own, so that few of the first are used
    lose(failed)
    host.max_rows = 16
    save_pages(executor, range(1, 13))
    assert [*filter(host.is_written, range(81))] == [*range(1, 13)]
    assert failed not in blocks_of(host, range(1, 13))
    assert host.num_rows <= 16
    host.check()


def test_blocks_are_packed_too_when_pages_come_from_elsewhere(executor: JaxExecutor) -> None:
    """80 pages and an eighth more take memory at most."""
    host = pinned(executor)
    for begin in (1, 17, 33, 49, 65):
        save_pages(executor, range(begin, begin + 16))
    contents = [memoryview(contents_of(executor, page)) for page in range(1, 81)]
    for begin in range(1, 17):  # one page of each block at a time
        pages = range(begin, 81, 16)
        executor.write_host_pages(pages, [contents[80 - page] for page in pages])
        assert host.num_rows <= 90
    assert [contents_of(executor, page) for page in range(1, 81)] == contents[::-1]


@pytest.mark.parametrize("gib", [2**-10, 0.01, 2.0, 33.3, 36.0, 36.1, 200.0])
def test_pages_of_a_gpu_take_no_more_host_memory_than_asked_for_with_their_waste(gib: float) -> None:
    page_bytes = 2**20
    num_pages, *_ = resolve_host_cache(Config(host_cache_gib=gib), "gpu", 2**40, page_bytes, 1)
    host = PinnedPages([jax.ShapeDtypeStruct((3, 2**18), "float32")], num_pages + 1)
    assert host.page_bytes == page_bytes
    assert num_pages <= host.max_rows <= gib * 2**30 / page_bytes
    assert host.max_rows > gib * 2**30 / page_bytes - 2
    on_cpu, *_ = resolve_host_cache(Config(host_cache_gib=gib), "cpu", 2**40, page_bytes, 1)
    assert on_cpu == int(gib * 2**30) // page_bytes


@pytest.mark.parametrize(("gib", "limit"), [(0.0, None), (4.5, "13"), (100.0, "108")])
def test_a_gpu_may_pin_as_much_as_its_pages_take(
    gib: float, limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "")
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    reserve_device_memory(gib)
    assert os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB") == limit


def test_a_call_puts_no_more_pages_into_place_than_there_may_be() -> None:
    mib = 2**20
    assert place_sizes(4 * mib)[-1] * 4 * mib == MAX_UNPLACED_BYTES
    assert place_sizes(5 * mib)[-1] * 5 * mib < MAX_UNPLACED_BYTES
    for page_bytes in (4 * mib, 5 * mib):
        first = Catalog(SHAPES, ("split", "place"), page_bytes).first
        made = [key[1] for key in first if not isinstance(key, StepShape) and key[0] == "place"]
        assert made == list(place_sizes(page_bytes))
