"""The soak notices what grows; `make soak` runs it."""

import pytest

from tests.chaos.soak import MAX_GROWTH_BYTES, Sample, growth

MIB = 2**20


def samples(sizes: list[float], files: int = 10, more_files: int = 0) -> list[Sample]:
    return [
        Sample(float(at), {"engine": int(size * MIB)}, {"engine": files + more_files * at}, {"engine": 4})
        for at, size in enumerate(sizes)
    ]


def test_what_is_level_or_comes_down_again_has_not_grown():
    assert not growth(samples([50, 60, 61, 62, 61, 62, 61, 62, 61, 62]))
    assert not growth(samples([50, 60, 90, 62, 61, 62, 61, 62, 61, 62]))
    assert not growth(samples([10, 90, 90, 90, 90, 90, 90, 90, 90, 90]))


@pytest.mark.parametrize("step", [3 * MAX_GROWTH_BYTES / MIB / 10, 30])
def test_what_grows_steadily_is_found(step):
    (line,) = growth(samples([50 + step * at for at in range(20)]))
    assert line.startswith("num_bytes of engine grew")


def test_files_that_are_not_closed_are_found():
    (line,) = growth(samples([50] * 20, more_files=1))
    assert line.startswith("num_files of engine grew")
