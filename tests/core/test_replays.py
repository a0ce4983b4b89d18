"""Each token is computed by the same kind of chunk every time, where kernels of prompts and of decodes differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.plan import Chunk, Kind
from tests.core.harness import Harness, limits, request
from tests.core.test_schedules import prompts
from tests.fake_executor import expected_tokens

REPLAYS = limits(replays=True, forces_tokens=False)


def spans(harness: Harness, request_id: int, kind: Kind) -> list[tuple[int, int, bool]]:
    """The chunks of a request of this kind, in their order: start, length, and whether it samples."""
    chunks: list[Chunk] = [chunk for plan in harness.executor.plans for chunk in plan.chunks]
    those = [chunk for chunk in chunks if chunk.request_id == request_id and chunk.kind is kind]
    return [(chunk.start, chunk.length, chunk.samples) for chunk in those]


def test_an_answer_that_goes_on_computes_its_prompt_and_decodes_the_rest():
    asked = request(1, prompt=(1, 2, 3, 4, 5), max_tokens=6)
    whole = expected_tokens(asked)
    harness = Harness(REPLAYS)
    harness.scheduler.add(asked, so_far=[whole[:3]])
    harness.run()
    assert harness.tokens[1, 0] == whole[3:]
    assert spans(harness, 1, Kind.PREFILL) == [(0, 5, False)]
    replayed = [(5, 1, False), (6, 1, False)]
    assert spans(harness, 1, Kind.DECODE) == [*replayed, (7, 1, True), (8, 1, True), (9, 1, True)]


def test_an_answer_of_one_token_goes_on_by_decoding_it():
    asked = request(1, prompt=(1, 2, 3, 4, 5), max_tokens=3)
    harness = Harness(REPLAYS)
    harness.scheduler.add(asked, so_far=[expected_tokens(asked)[:1]])
    harness.run()
    assert spans(harness, 1, Kind.PREFILL) == [(0, 5, False)]
    assert spans(harness, 1, Kind.DECODE) == [(5, 1, True), (6, 1, True)]


def test_after_the_device_was_lost_generated_tokens_are_decoded_again():
    asked = request(1, prompt=(1, 2, 3), max_tokens=5)
    harness = Harness(REPLAYS)
    harness.add(asked)
    for _ in range(3):
        harness.step()
    harness.lose_everything()
    before = len(harness.executor.plans)
    harness.run()
    again = [chunk for plan in harness.executor.plans[before:] for chunk in plan.chunks]
    kinds = [(chunk.kind, chunk.start, chunk.length) for chunk in again]
    assert kinds == [(Kind.PREFILL, 0, 3), *((Kind.DECODE, start, 1) for start in range(3, 7))]
    assert harness.tokens[1, 0] == expected_tokens(asked)


def test_the_next_turn_of_a_conversation_reuses_the_prompt_and_computes_the_answer_as_a_prompt():
    first = request(1, prompt=tuple(range(8)), max_tokens=8)
    answer = tuple(expected_tokens(first))
    second = request(2, prompt=(*range(8), *answer, 1, 2), max_tokens=2)
    for chosen, reused in ((REPLAYS, 8), (limits(), 12)):
        harness = Harness(chosen)
        harness.add(first)
        harness.run()
        harness.add(second)
        harness.run()
        assert harness.cached[2, 0] == reused


def test_a_page_with_the_end_of_a_prompt_and_the_begin_of_an_answer_is_not_reused():
    first = request(1, prompt=tuple(range(6)), max_tokens=4)  # pages of 4: the second has two of its tokens
    second = request(2, prompt=(*range(6), *expected_tokens(first)), max_tokens=2)
    harness = Harness(REPLAYS)
    harness.add(first)
    harness.run()
    harness.add(second)
    harness.run()
    assert harness.cached[2, 0] == 4


def test_replayed_tokens_run_beside_the_decodes_and_prompts_of_others():
    asked = request(1, prompt=(1, 2, 3), max_tokens=12)
    whole = expected_tokens(asked)
    harness = Harness(REPLAYS, lookahead=2)
    harness.add(request(2, prompt=(4, 5, 6), max_tokens=20))
    harness.step()
    harness.scheduler.add(asked, so_far=[whole[:8]])
    harness.add(request(3, prompt=(7,) * 20, max_tokens=4))
    harness.run()
    assert harness.tokens[1, 0] == whole[8:]
    mixed = [
        {(chunk.kind, chunk.samples) for chunk in plan.chunks}
        for plan in harness.executor.plans
        if any(chunk.kind is Kind.DECODE and not chunk.samples for chunk in plan.chunks)
    ]
    assert any((Kind.DECODE, True) in kinds for kinds in mixed)


def test_pages_that_a_replay_will_need_are_kept_from_others():
    """Four known tokens are left to replay, for which there is one page: one that would need it waits."""
    harness = Harness(limits(num_pages=5, replays=True, forces_tokens=False))
    asked = request(1, prompt=(1, 2, 3, 4), max_tokens=12)
    harness.scheduler.add(asked, so_far=[expected_tokens(asked)[:8]])
    harness.add(request(2, prompt=(9, 8, 7), max_tokens=2))
    harness.run()
    assert harness.scheduler.counters.preemptions == 0


@given(
    st.lists(st.tuples(prompts, st.integers(2, 14), st.floats(0, 1)), min_size=1, max_size=6),
    st.integers(0, 2),
    st.sampled_from([24, 40]),
    st.integers(1, 4),
)
def test_crowded_answers_that_go_on_come_to_an_end(asked, lookahead, num_tokens, slots):
    """Pages are short, so that many are preempted while they replay."""
    how: dict[str, object] = {"page_size": 2, "num_pages": num_tokens // 2 + 1, "max_batch_size": slots}
    harness = Harness(limits(replays=True, forces_tokens=False, max_burst=2, **how), lookahead)
    whole = {}
    for number, (prompt, max_tokens, share) in enumerate(asked, start=1):
        one = request(number, prompt=prompt[: num_tokens - max_tokens], max_tokens=max_tokens)
        tokens = expected_tokens(one)
        cut = int(share * (max_tokens - 1))
        whole[number] = tokens[cut:]
        harness.scheduler.add(one, so_far=[tokens[:cut]])
        harness.scheduler.check()
    harness.run()
    assert {number: harness.tokens[number, 0] for number in whole} == whole


@pytest.mark.parametrize("changes", [{"forces_tokens": True}, {"max_guesses": 1}, {"snapshots": 2}])
def test_what_computes_generated_tokens_otherwise_does_not_go_with_it(changes):
    with pytest.raises(ValueError, match="replays goes with neither"):
        limits(**({"replays": True, "forces_tokens": False} | changes))
