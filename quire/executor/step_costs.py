"""The sizes of steps that a device is good at, by the time that programs take.

The libraries' products are uneven: on one GPU 768 tokens of an 8B model take as long as 896, and 448 longer than 512.
"""

from collections.abc import Mapping, Sequence

SLACK = 1.04  # a token may take this much longer than in the best smaller step


def slower_than_larger(seconds: Mapping[int, float]) -> frozenset[int]:
    """The sizes that take no less time than a larger one."""
    return frozenset(
        size for size, took in seconds.items() if any(took >= seconds[other] for other in seconds if other > size)
    )


def good_sizes(seconds: Mapping[int, float], sizes: Sequence[int]) -> tuple[int, ...]:
    """The `sizes` at which a token takes hardly longer than in a smaller step. One that was not timed is as good
    as half of it."""
    good: set[int] = set()
    best = float("inf")  # seconds of a token
    for size in sorted(sizes):
        if size not in seconds:
            if size // 2 in good or size // 2 not in sizes:
                good.add(size)
        elif seconds[size] / size <= SLACK * best:
            good.add(size)
            best = min(best, seconds[size] / size)
    return tuple(sorted(good))
