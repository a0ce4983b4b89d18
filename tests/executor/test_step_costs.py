"""Sizes of steps by the times that they take."""

from hypothesis import given
from hypothesis import strategies as st

from quire.executor.programs.step_costs import SLACK, good_sizes, slower_than_larger

# Milliseconds of an 8B model's steps on one GPU: the library is bad at 448, 768 and 1,536 tokens.
MEASURED = {256: 7.55, 320: 8.73, 384: 10.0, 448: 15.4, 512: 12.4, 640: 14.15, 768: 19.0, 896: 20.0, 1024: 21.6}
MEASURED |= {1280: 27.5, 1536: 37.2, 1792: 38.2, 2048: 43.4}
LONGER = (2560, 3072, 3584, 4096, 8192)


def test_steps_that_a_library_is_bad_at_are_no_good_sizes_nor_is_twice_as_much() -> None:
    good = good_sizes(MEASURED, [*MEASURED, *LONGER])
    assert good == (256, 320, 384, 512, 640, 896, 1024, 1280, 1792, 2048, 2560, 3584, 4096, 8192)


def test_a_size_that_takes_no_less_than_a_larger_one_is_not_used() -> None:
    assert slower_than_larger(MEASURED) == {448}


@given(st.dictionaries(st.integers(1, 500), st.floats(0.1, 10.0), min_size=1))
def test_the_smallest_size_is_good_and_no_good_one_is_much_worse_than_a_smaller(seconds: dict[int, float]) -> None:
    good = good_sizes(seconds, list(seconds))
    assert good[0] == min(seconds)
    rates = [seconds[size] / size for size in good]
    assert all(rate <= SLACK * min(rates[: index + 1]) for index, rate in enumerate(rates))
    assert max(seconds) not in slower_than_larger(seconds)
