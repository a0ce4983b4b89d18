"""Sequences that grow beyond the length at which their tokens are computed otherwise."""

import pytest

from quire.core.plan import StepPlan
from quire.request import Grammar, GrammarKind
from tests.core.harness import Harness, MustFollow, limits, request
from tests.fake_executor import expected_tokens

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

    def __init__(self, lookahead: int = 0, must_follow: MustFollow | None = None, **changes: object) -> None:
        chosen = limits(**({"num_pages": 64} | changes))
        how = {"prefix_key": lambda n: int(n > SWITCH), "switch_length": SWITCH}
        super().__init__(chosen, lookahead, must_follow=must_follow, **how)
        self.computed: dict[int, list[tuple[int, int]]] = {}  # by request: the starts of chunks and their lengths

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            for chunk in plan.chunks:
                self.computed.setdefault(chunk.request_id, []).append((chunk.start, chunk.length))
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


@pytest.mark.parametrize("keep_pages", [True, False])
def test_a_sequence_that_loses_its_slot_at_the_switch_is_computed_as_a_long_one_at_once(keep_pages: bool) -> None:
    harness = Watched()
    harness.add(REQUESTS[0])
    while len(harness.tokens.get((1, 0), ())) < SWITCH + 1 - len(REQUESTS[0].prompt):
        harness.step()
    if keep_pages:
        (sequence,) = harness.scheduler._running
        harness.scheduler._running.preempt(sequence)
    else:
        harness.lose_everything()
    harness.run()
    assert harness.tokens[1, 0] == expected_tokens(REQUESTS[0])
    assert [start for start, _ in harness.computed[1]].count(0) == 2


def test_prompts_have_the_budget_of_a_sequence_whose_forced_tokens_must_wait_for_its_switch() -> None:
    """Else a step would be empty where each sequence may have one token of it."""
    asked = request(1, prompt=(1, 2, 3), max_tokens=20, grammar=Grammar(GrammarKind.TOKENS, "{}"))
    tokens = expected_tokens(asked)
    harness = Watched(max_batch_size=1, max_step_tokens=1, must_follow=lambda _, __, count: tokens[count : count + 3])
    harness.add(asked)
    harness.run()
    assert harness.tokens[1, 0] == tokens
