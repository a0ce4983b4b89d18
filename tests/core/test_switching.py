"""Sequences that grow beyond the length at which their tokens are computed otherwise."""

import pytest

from quire.core.plan import StepPlan
from tests.core.harness import Harness, limits, request

SWITCH = 12
SETTINGS = {
    "plain": {},
    "two steps ahead": {"lookahead": 2},
    "bursts": {"max_burst": 4, "lookahead": 1},
    "guesses": {"max_guesses": 3, "lookahead": 1},
    "no prefix cache": {"prefix_caching": False, "lookahead": 1},
    "few pages": {"num_pages": 14, "lookahead": 1},
    "host memory": {"num_pages": 14, "host_pages": 40, "lookahead": 1},
}
REQUESTS = [
    request(1, prompt=(1, 2, 3), max_tokens=20),
    request(2, prompt=(1, 2, 3), max_tokens=9),  # ends with its twelfth token
    request(3, prompt=(1, 2, 3), max_tokens=10),  # its twelfth token is the last that is computed
    request(4, prompt=tuple(range(12)), max_tokens=5, samples=2),
    request(5, prompt=tuple(range(13)), max_tokens=5),
]


class Watched(Harness):
    """Looks at how each position is computed."""

    def __init__(self, lookahead: int = 0, **changes: object) -> None:
        chosen = limits(**({"num_pages": 64} | changes))
        super().__init__(chosen, lookahead, prefix_key=lambda n: int(n > SWITCH), switch_length=SWITCH)
        self._is_long: dict[int, bool] = {}  # by slot
        self.computed: dict[int, list[tuple[int, int]]] = {}  # by request: the starts of chunks and their lengths

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            for start in plan.started:
                assert start.min_length in (0, SWITCH + 1)
                self._is_long[start.slot] = max(len(start.prompt), start.min_length) > SWITCH
            for chunk in plan.chunks:
                self.computed.setdefault(chunk.request_id, []).append((chunk.start, chunk.length))
                end = chunk.start + chunk.length
                assert self._is_long[chunk.slot] or end <= SWITCH, "a position beyond is computed as those before"
        return plan


def answers(harness: Harness) -> dict[tuple[int, int], list[int]]:
    for one in REQUESTS:
        harness.add(one)
    harness.run()
    assert not harness.failures
    return harness.tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_a_sequence_beyond_the_switch_is_computed_as_a_long_one_is(name: str) -> None:
    expected = answers(Harness(limits(num_pages=64)))
    assert answers(Watched(**SETTINGS[name])) == expected


def test_a_sequence_is_computed_anew_from_its_first_token_and_once() -> None:
    harness = Watched()
    harness.add(REQUESTS[0])
    harness.run()
    decodes = [(position, 1) for position in range(3, SWITCH)]
    beyond = [(position, 1) for position in range(SWITCH + 1, 22)]
    assert harness.computed[1] == [(0, 3), *decodes, (0, SWITCH + 1), *beyond]


@pytest.mark.parametrize("which", [1, 4])
def test_a_sequence_that_does_not_compute_a_position_beyond_is_not_computed_anew(which: int) -> None:
    harness = Watched()
    harness.add(REQUESTS[which])
    harness.run()
    assert [start for start, _ in harness.computed[REQUESTS[which].request_id]].count(0) == 1


def test_pages_from_before_the_switch_are_shared_with_short_prompts_only() -> None:
    harness = Watched()
    harness.add(REQUESTS[0])
    harness.run()
    known = (1, 2, 3, *harness.tokens[1, 0])
    harness.add(request(2, prompt=known[:11], max_tokens=1))
    harness.add(request(3, prompt=known[:20], max_tokens=1))
    harness.run()
    assert (harness.cached[2, 0], harness.cached[3, 0]) == (10, 19)
    assert harness.computed[2] == [(10, 1)]


def test_a_sequence_that_goes_on_beyond_the_switch_begins_as_a_long_one() -> None:
    harness = Watched()
    harness.scheduler.add(REQUESTS[0], so_far=[tuple(range(10))])
    harness.run()
    assert harness.computed[1][0] == (0, 13)
