"""A request goes on where another engine left it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidRequest
from tests.core.harness import Harness, limits, request
from tests.core.test_schedules import requests
from tests.fake_executor import NAN, expected_tokens

ROOMY = limits(num_pages=200)


@given(st.data(), st.integers(0, 2))
def test_what_was_generated_before_and_after_is_what_one_engine_generates(data, lookahead):
    asked = [one for one in (data.draw(requests(number)) for number in range(3)) if NAN not in one.prompt]
    whole = {(one.request_id, sample): expected_tokens(one, sample) for one in asked for sample in range(one.samples)}
    harness = Harness(ROOMY, lookahead)
    cut: dict[tuple[int, int], int | None] = {}
    for one in asked:
        for sample in range(one.samples):
            length = len(whole[one.request_id, sample])
            cut[one.request_id, sample] = data.draw(st.one_of(st.none(), st.integers(0, max(0, length - 1))))
        so_far = [
            None if at is None else whole[one.request_id, sample][:at]
            for sample, at in ((sample, cut[one.request_id, sample]) for sample in range(one.samples))
        ]
        if all(each is None for each in so_far):
            so_far[0], cut[one.request_id, 0] = [], 0
        harness.scheduler.add(one, so_far=so_far)
        harness.scheduler.check()
    harness.run()
    for key, at in cut.items():
        assert harness.tokens.get(key, []) == ([] if at is None else whole[key][at:])
        assert (key in harness.finished) == (at is not None)


def test_a_request_that_was_admitted_once_is_not_refused_when_the_queue_is_full():
    harness = Harness(limits(max_queued=1, max_batch_size=1))
    for number in range(3):
        harness.scheduler.add(request(number), so_far=[[]])
    assert harness.scheduler.num_waiting == 3


@pytest.mark.parametrize(
    ("so_far", "why"),
    [
        ([[1], [2]], "2 samples are to go on"),
        ([None], "every sample has ended"),
        ([[1, 2, 3, 4]], "4 tokens were generated; max_tokens is 4"),
        ([[-1]], "a generated token is not between"),
        ([[2**31]], "a generated token is not between"),
    ],
)
def test_what_cannot_be_is_refused(so_far, why):
    with pytest.raises(InvalidRequest, match=why):
        Harness(ROOMY).scheduler.add(request(1, max_tokens=4), so_far=so_far)
