"""The times of a request, by hand."""

import pytest

from quire.server.observe.times import RequestTimes


def test_the_times_of_a_request_add_up():
    times = RequestTimes(10.0)
    times.tokenising_s = 0.25
    times.submitted_s = 11.0
    times.note_queue(0.5)
    times.note_queue(2.0)  # of another prompt of the same request
    assert times.note_tokens(14.0) is None
    times.note_queue(9.0)  # in another engine, after the first token
    assert times.note_tokens(14.5) == 0.5
    assert times.note_tokens(16.0) == 1.5
    times.ended_s = 17.0
    assert (times.validation_s, times.queue_s, times.prefill_s, times.decode_s) == (1.0, 2.0, 1.0, 2.0)
    assert times.validation_s + times.queue_s + times.prefill_s + times.decode_s == times.answer_s == 6.0
    assert (times.started_s, times.first_token_s, times.inference_s, times.total_s) == (13.0, 4.0, 4.0, 7.0)
    assert times.per_token_s(8) == 0.5


def test_a_request_that_got_no_token_has_no_first_one():
    times = RequestTimes(10.0)
    times.submitted_s, times.ended_s = 11.0, 12.0
    times.note_queue(5.0)  # the wait was cut off by the end
    assert times.first_token_s is None
    assert (times.prefill_s, times.decode_s) == (0.0, 0.0)
    assert times.started_s == 12.0
    assert times.per_token_s(0) == pytest.approx(times.inference_s)
