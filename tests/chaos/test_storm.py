"""A short storm; `make chaos` has longer ones."""

import pytest

from tests.chaos.near_ties import Scored, is_near_tie
from tests.chaos.storm import run_storm


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_in_a_storm_every_token_is_right(tmp_path, data_parallel):
    storm = run_storm("fake", 7, duration_s=7, one_in=1000, folder=tmp_path, data_parallel=data_parallel)
    assert not storm.wrong, storm.wrong[0]
    assert storm.counts["answered"] > 20
    assert storm.counts["engine restarts"] > 0


def test_an_answer_that_parts_where_two_tokens_were_level_is_told_from_a_wrong_one():
    right = Scored("one two three", [0, 3, 7], [2.0, 1e-5, 3.0])
    assert is_near_tie(right, "one ten")
    assert is_near_tie(right, "one twofold")  # the level token, and one that begins like it
    assert is_near_tie(right, "one")
    assert not is_near_tie(right, "on three")
    assert not is_near_tie(right, "one two thirty")
