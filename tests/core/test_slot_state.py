"""Slots with state beside pages: only the tokens of a sequence make it, so each begins with its first one."""

import pytest

from tests.core.harness import Harness, limits, request
from tests.fake_executor import expected_tokens


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_no_sequence_begins_with_pages_of_another(prefix_caching: bool) -> None:
    harness = Harness(limits(snapshots=0, prefix_caching=prefix_caching, num_pages=65), lookahead=1)
    asked = [request(number, prompt=tuple(range(12)), max_tokens=8, samples=2) for number in (1, 2, 3)]
    for one in asked:
        harness.add(one)
        harness.step()
    harness.run()
    assert all(
        harness.tokens[one.request_id, sample] == expected_tokens(one, sample) for one in asked for sample in (0, 1)
    )
    assert harness.scheduler.counters.cached_tokens == 0


def test_equal_prompts_do_not_wait_for_each_other() -> None:
    harness = Harness(limits(snapshots=0))
    for number in (1, 2):
        harness.add(request(number, prompt=tuple(range(8))))
    harness.plan()
    assert harness.scheduler.num_running == 2
    harness.run()


def test_a_sequence_that_was_preempted_begins_again() -> None:
    harness = Harness(limits(snapshots=0, num_pages=12), lookahead=1)
    asked = [request(number, prompt=(number, *range(12)), max_tokens=20) for number in (1, 2)]
    for one in asked:
        harness.add(one)
    harness.run()
    assert harness.scheduler.counters.preemptions > 0
    assert all(harness.tokens[one.request_id, 0] == expected_tokens(one) for one in asked)


def test_a_long_sequence_that_was_preempted_has_all_pages_to_itself() -> None:
    """None are kept for a sequence that could begin with them."""
    harness = Harness(limits(snapshots=0, num_pages=17), lookahead=1)
    asked = [request(1, prompt=tuple(range(8)), max_tokens=30), request(2, prompt=tuple(range(47)), max_tokens=16)]
    for one in asked:
        harness.add(one)
    harness.run(max_steps=500)
    assert harness.scheduler.counters.preemptions > 0
    assert all(harness.tokens[one.request_id, 0] == expected_tokens(one) for one in asked)


@pytest.mark.parametrize("setting", [{"max_guesses": 1}, {"host_pages": 4}])
def test_what_needs_an_older_state_is_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="slots with state"):
        limits(snapshots=0, **setting)
