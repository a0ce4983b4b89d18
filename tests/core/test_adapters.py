"""Adapters are swapped in when sequences start, and none waits for ever."""

import pytest

from quire.core.adapter_slots import AdapterSlots
from quire.core.sequence import Sequence
from quire.core.stats import Blocker
from quire.errors import EngineFailed, ModelNotFound
from tests.core.harness import Harness, limits, request
from tests.fake_executor import expected_tokens


def harness(max_loras: int, *names: str, **changes: object) -> Harness:
    made = Harness(limits(max_loras=max_loras, **changes))
    for name in names:
        made.load_adapter(name)
    return made


def loads(made: Harness) -> list[tuple[int, int]]:
    return [tuple(load) for plan in made.executor.plans for load in plan.adapter_loads]


def test_an_adapter_is_loaded_once_for_all_that_use_it() -> None:
    made = harness(2, "a", "b")
    for number in range(1, 9):
        made.add(request(number, adapter="ab"[number % 2]))
    made.run()
    assert sorted(loads(made)) == [(1, 2), (2, 1)] or sorted(loads(made)) == [(1, 1), (2, 2)]


def test_the_least_recently_used_adapter_leaves() -> None:
    made = harness(2, "a", "b", "c")
    for number, name in enumerate(("a", "b", "a", "c", "a", "b"), start=1):
        made.add(request(number, adapter=name))
        made.run()
    assert loads(made) == [(1, 1), (2, 2), (2, 3), (2, 2)]


def test_a_sequence_waits_for_a_slot_and_others_pass_it() -> None:
    made = harness(1, "a", "b")
    made.add(request(1, adapter="a", max_tokens=8))
    made.step()
    made.add(request(2, adapter="b"))
    made.add(request(3))
    made.step()
    assert made.scheduler.num_running == 2
    assert made.scheduler.blocked_by is Blocker.ADAPTERS
    made.run()
    assert loads(made) == [(1, 1), (1, 2)]
    assert made.tokens[2, 0] == expected_tokens(request(2, adapter="b"), adapter=2)


def test_a_stream_of_requests_for_one_adapter_does_not_keep_another_waiting() -> None:
    """Those that come later must not hold the slot for ever."""
    made = harness(1, "a", "b")
    made.add(request(1, adapter="a", max_tokens=6))
    made.step()
    made.add(request(2, adapter="b", max_tokens=2))
    for number in range(3, 40):
        made.add(request(number, adapter="a", max_tokens=6))
        made.step()
        if (2, 0) in made.finished:
            break
    assert (2, 0) in made.finished
    assert sum(key[0] > 2 for key in made.finished) == 0, "one that came later went first"
    made.run()


def test_one_that_was_aborted_while_it_waited_holds_up_none() -> None:
    made = harness(1, "a", "b")
    made.add(request(1, adapter="a", max_tokens=12))
    made.step()
    made.add(request(2, adapter="b"))
    made.add(request(3, adapter="a", max_tokens=2))
    made.step()
    assert made.scheduler.num_running == 1
    made.abort(2)
    made.step()
    assert made.scheduler.num_running == 2
    made.run()


def test_pages_are_shared_among_requests_with_one_adapter_alone() -> None:
    made = harness(2, "a", "b")
    prompt = tuple(range(12))
    for number, name in enumerate(("a", "b", None, "a"), start=1):
        made.add(request(number, prompt, adapter=name))
        made.run()
    assert [made.cached[number, 0] for number in (1, 2, 3, 4)] == [0, 0, 0, 11]
    made.load_adapter("a")
    made.add(request(5, prompt, adapter="a"))
    made.run()
    assert made.cached[5, 0] == 0, "pages of another adapter with that name were used"


def test_those_that_have_an_adapter_keep_it_when_its_name_goes() -> None:
    made = harness(1, "a")
    made.add(request(1, adapter="a", max_tokens=6))
    made.step()
    made.scheduler.adapters.unload("a")
    with pytest.raises(ModelNotFound, match="no adapter 'a'; loaded are: none"):
        made.add(request(2, adapter="a"))
    assert made.scheduler.adapters.is_needed(1)
    made.run()
    assert made.tokens[1, 0] == expected_tokens(request(1, max_tokens=6), adapter=1)
    assert not made.scheduler.adapters.is_needed(1)


def test_one_that_began_elsewhere_has_the_adapter_of_its_digest_and_shares_pages_with_no_other() -> None:
    made = harness(2)
    prompt = tuple(range(12))
    slots = made.scheduler.adapters
    for digest in ("before", "now"):
        made.executor.add_adapter(slots.load("a", digest), digest)
        made.add(request(slots.find("a"), prompt, adapter="a", max_tokens=6))
        made.step()
    for number, digest in ((3, "before"), (4, "now"), (5, "")):
        made.add(request(number, prompt, adapter="a", adapter_digest=digest, max_tokens=6))
    made.run()
    for number, adapter in ((3, 1), (4, 2), (5, 2)):
        assert made.tokens[number, 0] == expected_tokens(request(number, prompt, max_tokens=6), adapter=adapter)
    assert not slots.is_needed(1)
    with pytest.raises(EngineFailed, match="'a' has changed since the answer began"):
        made.add(request(6, prompt, adapter="a", adapter_digest="before"))


def test_an_adapter_that_is_loaded_for_one_that_began_elsewhere_goes_with_it() -> None:
    made = harness(1, "a")
    slots = made.scheduler.adapters
    number = slots.hold_former("a", "before")
    made.executor.add_adapter(number, "before")
    made.add(request(1, adapter="a", adapter_digest="before", max_tokens=6))
    slots.release(number)
    made.add(request(2, adapter="a"))
    made.run()
    assert made.tokens[1, 0] == expected_tokens(request(1, max_tokens=6), adapter=number)
    assert made.tokens[2, 0] == expected_tokens(request(2), adapter=1)
    assert not slots.is_needed(number)
    assert slots.names == ["a"]


def test_adapters_are_loaded_again_when_the_device_was_lost() -> None:
    made = harness(1, "a")
    made.add(request(1, adapter="a", max_tokens=6))
    made.step()
    made.lose_everything()
    made.run()
    assert loads(made) == [(1, 1), (1, 1)]


def test_adapters_in_use_have_the_names_that_they_were_loaded_under() -> None:
    made = harness(1, "a", "b", "c")
    in_use = made.scheduler.adapters.in_use
    assert in_use() == ([], [])
    made.add(request(1, adapter="a", max_tokens=8))
    assert in_use() == ([], ["a"])
    made.step()
    for number, name in enumerate(("c", "b", "c"), start=2):
        made.add(request(number, adapter=name))
    made.add(request(5))
    made.step()
    assert in_use() == (["a"], ["b", "c"])
    made.scheduler.adapters.unload("a")
    made.scheduler.adapters.unload("b")
    made.load_adapter("c")
    assert in_use() == (["a"], ["b", "c"])
    made.run()
    assert in_use() == ([], [])


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    slots = AdapterSlots(1)
    slots.load("b")
    slots.load("a")
    with pytest.raises(ModelNotFound, match="no adapter 'c'; loaded are: a, b"):
        slots.find("c")


def test_a_slot_is_kept_for_the_one_that_waits_also_when_it_cannot_begin_at_once() -> None:
    """As a long prompt behind another one: those that may pass it must not take the slot, or it would wait for ever."""
    slots = AdapterSlots(2)
    adapters = {name: slots.load(name) for name in "abcd"}
    a, b, waiting, other, second = (
        Sequence(number, request(number), 0, "", (), adapters[name]) for number, name in enumerate("abcda", start=1)
    )
    for one in (a, b):
        assert slots.has_room(one)
        slots.start(one)
    assert not slots.has_room(waiting)
    slots.stop(a)
    assert slots.has_room(waiting)  # and yet it does not begin
    assert not slots.has_room(other), "a younger one takes the slot"
    assert not slots.has_room(second), "a younger one keeps the adapter in the slot"
    slots.stop(b)
    assert slots.has_room(other), "there is another slot"
    slots.start(other)
    assert slots.has_room(waiting), "the younger one took the slot that was kept"
    slots.start(waiting)
    slots.check([waiting, other])
