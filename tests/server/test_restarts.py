"""The number and the delays of restarts."""

from itertools import pairwise

from quire.server.processes.restarts import MAX_DELAY_S, MAX_FAILED_STARTS, QUICK_S, SEARCH_FACTOR, Restarts


def test_the_first_end_is_mended_at_once_and_those_that_follow_back_off():
    restarts = Restarts(10)
    delays = [restarts.delay_s(1.0) for _ in range(10)]
    assert delays[0] == 0
    assert all(later >= earlier for earlier, later in pairwise(delays))
    assert delays[-1] == MAX_DELAY_S


def test_after_so_many_quick_ends_in_a_row_it_is_given_up():
    restarts = Restarts(3)
    assert [restarts.delay_s(1.0) is None for _ in range(4)] == [False, False, False, True]


def test_a_process_that_worked_for_a_while_has_all_its_tries_again():
    restarts = Restarts(2)
    for _ in range(20):
        assert restarts.delay_s(QUICK_S) == 0
        assert restarts.delay_s(1.0) is not None


def test_one_that_never_gets_ready_is_given_up_sooner():
    restarts = Restarts(100)
    delays = [restarts.delay_s(None) for _ in range(MAX_FAILED_STARTS + 1)]
    assert None not in delays[:-1]
    assert delays[-1] is None


def test_zero_restarts_are_none():
    assert Restarts(0).delay_s(1000.0) is None


def test_ends_on_the_way_to_a_culprit_do_not_count():
    restarts = Restarts(2)
    assert restarts.delay_s(1.0) == 0.0
    assert [restarts.delay_s(1.0, was_searching=True) for _ in range(2 * SEARCH_FACTOR)] == [0.0] * 2 * SEARCH_FACTOR
    assert restarts.delay_s(1.0) is not None
    assert restarts.delay_s(1.0, was_searching=True) is None  # it does not come to an end
