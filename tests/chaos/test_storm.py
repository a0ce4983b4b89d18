"""A short storm; `make chaos` has longer ones."""

from tests.chaos.storm import run_storm


def test_in_a_storm_every_token_is_right(tmp_path):
    storm = run_storm("fake", seed=7, duration_s=7, one_in=1000, folder=tmp_path)
    assert not storm.wrong, storm.wrong[0]
    assert storm.counts["answered"] > 20
    assert storm.counts["engine restarts"] > 0
