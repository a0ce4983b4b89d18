"""Integers of programs are on their way to the device before the pages that the same plan fetches."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from quire.core.plan import device_copy
from quire.executor import early_inputs
from quire.executor.program_table import Key
from tests.executor.rig import Rig
from tests.executor.test_host_pages import host_copies
from tests.executor.test_page_copies import Talk


class Watched:
    """The calls of a talk's executor, in order: integers that are sent, fetches and programs."""

    def __init__(self, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.late: list[Key] = []  # programs that are called with integers of the host
        host, programs, put = talk.executor.host_pages, talk.executor.programs, early_inputs.put
        assert host is not None
        fetch, get = host.fetch, programs.get

        def watched_put(packed: Any, where: Any) -> jax.Array:
            self.calls.append("sent")
            return put(packed, where)

        def watched_fetch(sources: Sequence[int], targets: Sequence[int], *others: Any, **named: Any) -> Any:
            fetched = fetch(sources, targets, *others, **named)
            self.calls.append("fetched")
            return fetched

        def watched_get(key: Key) -> Callable[..., Any]:
            program = get(key)

            def call(*arguments: Any) -> Any:
                self.calls.append("called")
                if any(isinstance(one, np.ndarray) for one in arguments):
                    self.late.append(key)
                return program(*arguments)

            return call

        monkeypatch.setattr(early_inputs, "put", watched_put)
        monkeypatch.setattr(host, "fetch", watched_fetch)
        monkeypatch.setattr(programs, "get", watched_get)


def test_a_decode_does_not_wait_for_the_pages_that_its_step_fetches(
    any_llama: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the programs before it: one saves pages, another copies one."""
    talk = Talk(any_llama)
    watched = Watched(talk, monkeypatch)
    saved = host_copies({7: 31, 8: 32}, to_host=True)
    talk.run_decode((*saved, device_copy(3, 40), *host_copies({50: 1, 51: 2}, to_host=False)))
    first = watched.calls.index("fetched")
    assert set(watched.calls[:first]) == {"sent"}
    assert set(watched.calls[first + 1 :]) == {"called"}
    assert first == watched.calls.count("called") >= 3
    assert watched.late == []
    monkeypatch.undo()
    found = [talk.executor.read_pages([page])() for page in (40, 50, 51)]
    assert found == [talk.contents[page] for page in (3, 3, 4)]


def test_a_slot_that_begins_does_not_wait_for_pages_either(any_llama: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(any_llama)
    talk.run_decode(host_copies({4: 1, 3: 2, 6: 3, 5: 4}, to_host=False))
    watched = Watched(talk, monkeypatch)
    others = host_copies({50: 1}, to_host=False)
    result = talk.run((talk.decode, talk.last), others, started=talk.started)
    assert result.tokens[1] == talk.expected
    assert "start" not in {key[0] for key in watched.late}
    assert watched.calls.index("fetched") == watched.calls.count("sent") >= 2


def test_a_chunk_that_needs_the_pages_is_packed_while_they_come(
    any_llama: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages come first then, but for what makes room for them."""
    talk = Talk(any_llama)
    watched = Watched(talk, monkeypatch)
    saved = host_copies({3: 31, 4: 32, 5: 33, 6: 34}, to_host=True)
    fetched = host_copies({4: 1, 3: 2, 6: 3, 5: 4}, to_host=False)
    result = talk.run((talk.last,), (*saved, *fetched), started=talk.started)
    assert result.tokens[0] == talk.expected
    assert watched.calls.index("fetched") == watched.calls.count("sent")
    kinds = {key[0] for key in watched.late if isinstance(key[0], str)}
    assert "start" in kinds
    assert kinds.isdisjoint(("save", "split"))


def test_a_plan_that_fetches_nothing_sends_integers_with_its_calls(
    any_llama: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(any_llama)
    watched = Watched(talk, monkeypatch)
    talk.run_decode((*host_copies({7: 31}, to_host=True), device_copy(3, 40)))
    assert set(watched.calls) == {"called"}
