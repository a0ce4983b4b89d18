"""Pages that come take memory until they are entered or not wanted, and their thread has ended."""

from itertools import permutations

import pytest

from quire.peers.bundle import PageBundle, PageRange
from quire.peers.page_arrival import PageArrival

BUNDLE = PageBundle(PageRange((0,), 1), memoryview(b"page"))
CALLS = {
    "end": lambda arrival: arrival.end(BUNDLE),
    "inserted": lambda arrival: arrival.inserted(),
    "cancel": lambda arrival: arrival.cancel(),
    "expire": lambda arrival: arrival.expire(),
}


@pytest.mark.parametrize("order", [order for count in range(5) for order in permutations(CALLS, count)])
def test_memory_is_released_once_when_the_pages_are_gone(order: tuple[str, ...]) -> None:
    released: list[str] = []
    arrival = PageArrival(lambda: released.append(name))
    for name in order:
        CALLS[name](arrival)
        seen = order[: order.index(name) + 1]
        assert len(released) == ("end" in seen and not {"inserted", "cancel"}.isdisjoint(seen))


@pytest.mark.parametrize("order", [("end", "expire"), ("expire", "end")])
def test_the_first_result_counts(order: tuple[str, ...]) -> None:
    arrival = PageArrival(lambda: None)
    for name in order:
        CALLS[name](arrival)
    assert arrival.result.result(0) == (BUNDLE if order[0] == "end" else None)
    assert arrival.is_late == (order[0] == "expire")
