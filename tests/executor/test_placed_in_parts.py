"""Pages that come from pinned memory are put into place while the last of them are still on their way."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from quire.core.plan import Chunk, Kind
from quire.executor.executor import JaxExecutor
from quire.executor.host import pinned_pages
from quire.executor.host.host_pages import Fetched
from quire.executor.host.pinned_pages import in_parts
from quire.executor.programs.kinds import Key
from tests.executor import test_pinned_pages
from tests.executor.test_host_pages import host_copies
from tests.executor.test_pinned_pages import begin_copies, save_pages
from tests.fake_executor import plan_of

DECODE = Chunk(1, 0, 0, 0, Kind.DECODE, 5, 1, (), True)


pinned = test_pinned_pages.executor  # the fixture


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([16], [[16]]),
        ([16, 16], [[16], [16]]),
        ([16] * 8, [[16] * 3, [16] * 4, [16]]),
        ([16] * 9, [[16] * 4, [16] * 4, [16]]),
        ([16, 16, 4, 4, 1], [[16, 16], [4, 4, 1]]),
        ([1] * 100, [[1] * 20, [1] * 64, [1] * 16]),
    ],
)
def test_the_last_block_is_placed_alone(rows: list[int], parts: list[list[int]]) -> None:
    blocks = [Fetched(np.full(count, number + 1, np.int32), []) for number, count in enumerate(rows)]
    found = in_parts(blocks)
    assert [[len(one.targets) for one in part] for part in found] == parts
    assert [one for part in found for one in part] == blocks


class Watched:
    """Copies that begin and programs that are called, in order."""

    def __init__(self, executor: JaxExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        get, put = executor.programs.get, jax.device_put

        def watched_get(key: Key) -> Callable[..., Any]:
            program = get(key)

            def call(*arguments: Any) -> Any:
                self.calls.append(key)
                return program(*arguments)

            return call

        def watched_put(arrays: Any, where: Any) -> Any:
            self.calls.append(f"{len(arrays)} fetched")
            return put(arrays, where)

        monkeypatch.setattr(executor.programs, "get", watched_get)
        monkeypatch.setattr(jax, "device_put", watched_put)


@pytest.mark.parametrize(
    ("many_bytes", "expected"),
    [
        (1, ["1 fetched", "3 fetched", ("place", 64), ("place", 16)]),
        (2**40, ["1 fetched", "3 fetched", ("place", 64)]),
    ],
)
def test_many_pages_are_placed_as_they_arrive(
    pinned: JaxExecutor,
    monkeypatch: pytest.MonkeyPatch,
    many_bytes: int,
    expected: list[Any],
) -> None:
    monkeypatch.setattr(pinned_pages, "MANY_BYTES", many_bytes)
    save_pages(pinned, range(1, 62))
    before = {page: pinned.read_pages([page])() for page in range(1, 62)}
    pinned.reset()
    watched = Watched(pinned, monkeypatch)
    targets = {62 - page: page for page in range(1, 62)}
    pending = pinned.submit(plan_of(2, (), copies=host_copies(targets, to_host=False)))
    assert watched.calls == expected
    monkeypatch.undo()
    pending.result()
    for page, source in targets.items():
        assert pinned.read_pages([page])() == before[source], page


def test_pages_of_steps_before_are_placed_at_once(
    pinned: JaxExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are there, as far as the host knows; those of the last step follow in parts."""
    monkeypatch.setattr(pinned_pages, "MANY_BYTES", 1)
    save_pages(pinned, range(1, 65))
    before = {page: pinned.read_pages([page])() for page in range(1, 65)}
    plan = plan_of(2, (DECODE,), copies=host_copies({page: page for page in range(1, 33)}, to_host=False))
    pinned.reset()
    watched = Watched(pinned, monkeypatch)
    begin_copies(pinned, plan)
    assert watched.calls == ["1 fetched", "1 fetched"]
    watched.calls.clear()
    last = {page: page for page in range(33, 65)}
    pinned.submit(plan_of(3, (), copies=host_copies(last, to_host=False)))
    places = [call for call in watched.calls if isinstance(call, tuple)]
    assert places == [("place", 64), ("place", 16), ("place", 16)]
    monkeypatch.undo()
    assert all(pinned.read_pages([page])() == before[page] for page in range(1, 65))
