"""Pages that went to the host and back are those that were computed."""

from typing import Any

import jax
import numpy as np
import pytest

from quire.core.plan import Chunk, Kind, PageCopy, Place, StepPlan, Tier
from quire.engine.engine import Engine
from quire.executor.host.host_pages import HostPages
from quire.request import Request
from tests.executor.conftest import HOST_PAGES
from tests.executor.faulty_executor import FaultyExecutor
from tests.executor.rig import Rig, Run
from tests.executor.sampling import slot_start
from tests.executor.test_schedules import check
from tests.executor.workload import GREEDY
from tests.fake_executor import plan_of

NUM_TALKS = 6


def host_copies(pages: dict[int, int], to_host: bool) -> tuple[PageCopy, ...]:
    """By device page: the host page."""
    places = [(Place(Tier.DEVICE, device), Place(Tier.HOST, host)) for device, host in pages.items()]
    return tuple(PageCopy(*(pair if to_host else pair[::-1])) for pair in places)


def first_turns(rig: Rig) -> list[Request]:
    """More than the pages of a small cache hold."""
    rng = np.random.default_rng(7)
    prompts = [tuple(rng.integers(0, rig.model.vocab_size, 40 + 9 * n).tolist()) for n in range(NUM_TALKS)]
    return [Request(n, prompt, 6, GREEDY, salt=rig.salt(prompt)) for n, prompt in enumerate(prompts)]


def second_turns(rig: Rig, first: list[Request], run: Run) -> list[Request]:
    rng = np.random.default_rng(8)
    turns = []
    for request in first:
        said = [*request.prompt, *run.answers[request.request_id, 0].tokens]
        prompt = (*said, *rng.integers(0, rig.model.vocab_size, 5).tolist())
        turns.append(Request(100 + request.request_id, prompt, 6, GREEDY, salt=rig.salt(prompt)))
    return turns


def two_turns(rig: Rig, **settings: Any) -> tuple[Engine, list[Request], Run]:
    """The second turns of conversations whose pages do not fit the device together."""
    groups = len(rig.limits().page_groups)
    settings = {"num_pages": 160 * groups // rig.shapes.page_size, "max_batch_size": 1} | settings
    engine = rig.engine(**settings)
    first = first_turns(rig)
    before = rig.run(first, engine=engine)
    second = second_turns(rig, first, before)
    return engine, second, rig.run(second, engine=engine)


@pytest.mark.parametrize("name", ["llama", "specialised_llama", "drafted_gemma"])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_second_turns_restore_the_pages_that_were_evicted(
    request: pytest.FixtureRequest, name: str, lookahead: int
) -> None:
    rig: Rig = request.getfixturevalue(name)
    _, second, without = two_turns(rig, lookahead=lookahead)
    engine, _, run = two_turns(rig, lookahead=lookahead, host_pages=HOST_PAGES, max_page_restores=5)
    assert check(rig, second, run) <= 1
    assert engine.scheduler.stats().restored_pages > NUM_TALKS
    for asked in second:  # all but the last token of the first turn, and what is new
        known = len(asked.prompt) - 6
        assert run.answers[asked.request_id, 0].cached_tokens >= known // rig.shapes.page_size * rig.shapes.page_size
    assert without.answers[second[0].request_id, 0].cached_tokens < rig.shapes.page_size


@pytest.mark.parametrize("where", ["submit", "result"])
def test_pages_on_the_host_survive_a_step_that_fails(llama: Rig, where: Any) -> None:
    """The device's state is lost in the middle of the second turns."""
    failed: list[int] = []

    def fails(plan: StepPlan) -> bool:
        is_restored = any(copy.source.tier is Tier.HOST for copy in plan.copies)
        if is_restored and len(failed) < 2:
            failed.append(plan.step)
            return True
        return False

    engine, second, run = two_turns(
        llama, host_pages=HOST_PAGES, max_page_restores=5, executor=FaultyExecutor(llama.executor, fails, where)
    )
    assert len(failed) == 2
    assert engine.num_faults >= 1  # the second of two steps under way is discarded
    assert check(llama, second, run) <= 1
    assert engine.scheduler.stats().restored_pages > NUM_TALKS


def test_a_page_is_the_same_after_it_was_on_the_host(any_llama: Rig) -> None:
    """More pages than one program copies, to the host in one step and back to other pages in a later one, without
    chunks."""
    executor, size = any_llama.executor, any_llama.shapes.page_size
    prompt = tuple(range(20, 20 + 8 * size))
    executor.reset()
    pages = tuple(range(3, 11))
    first = Chunk(0, 0, 0, 0, Kind.PREFILL, 0, 8 * size, (pages,), True)
    expected = executor.submit(plan_of(1, (first,), started=(slot_start(GREEDY, prompt=prompt),))).result()
    saved = {page: 30 + n for n, page in enumerate(range(3, 23))}
    assert executor.submit(plan_of(2, (), copies=host_copies(saved, to_host=True))).result().tokens == []
    executor.reset()
    restored = {page + 50: host for page, host in saved.items()}
    executor.submit(plan_of(3, (), copies=host_copies(restored, to_host=False))).result()
    moved = tuple(page + 50 for page in pages)
    again = Chunk(1, 0, 0, 1, Kind.PREFILL, 8 * size - 1, 1, (moved,), True)
    plan = plan_of(4, (again,), started=(slot_start(GREEDY, slot=1, prompt=prompt),))
    assert executor.submit(plan).result().tokens == expected.tokens
    assert executor.programs.num_late == 0


def test_a_page_can_be_saved_overwritten_and_restored_in_one_step(llama: Rig) -> None:
    """Copies run in their order: what is saved is what stood there before."""
    executor, size = llama.executor, llama.shapes.page_size
    host = executor.host_pages
    assert host is not None
    executor.reset()
    prompt = tuple(range(20, 20 + size))
    for slot, page in enumerate((3, 4)):
        chunk = Chunk(slot, 0, 0, slot, Kind.PREFILL, 0, size, ((page,),), True)
        start = slot_start(GREEDY, slot=slot, prompt=prompt if slot else prompt[::-1])
        executor.submit(plan_of(slot + 1, (chunk,), started=(start,))).result()
    executor.submit(plan_of(3, (), copies=host_copies({3: 1, 4: 2}, to_host=True))).result()
    both = host_copies({3: 3}, to_host=True) + host_copies({3: 2}, to_host=False)
    executor.submit(plan_of(4, (), copies=both)).result()
    executor.submit(plan_of(5, (), copies=host_copies({3: 4}, to_host=True))).result()
    before, second, kept, after = [[array.tobytes() for array in host.read([page])] for page in (1, 2, 3, 4)]
    assert before != second
    assert kept == before
    assert after == second


def test_page_arrays_of_one_shape_are_stacked() -> None:
    small, large = jax.ShapeDtypeStruct((9, 4, 2), "float32"), jax.ShapeDtypeStruct((9, 4, 6), "bfloat16")
    host = HostPages([(small, small), (large, large), small], 5)
    assert [(stack.members, stack.shape) for stack in host.stacks] == [((0, 1, 4), (3, 4, 2)), ((2, 3), (2, 4, 6))]
    assert host.page_bytes == 3 * 8 * 4 + 2 * 24 * 2
    contents = [np.full((2, *stack.shape), 7, stack.dtype) for stack in host.stacks]
    host.write([3, 1], contents)
    read = host.read([1, 2])
    assert [float(array[0].min()) for array in read] == [7, 7]
    assert [float(array[1].max()) for array in read] == [0, 0]
    host.close()


def test_a_write_of_a_failed_step_does_not_arrive_after_a_reset(llama: Rig) -> None:
    host = llama.executor.host_pages
    assert host is not None
    contents = [np.ones((1, *stack.shape), stack.dtype) for stack in host.stacks]
    written = host.write_when_ready([5], [jax.device_put(one) for one in contents])
    llama.executor.reset()
    assert written.done()
