"""Sets of capabilities that have every pair together."""

from collections.abc import Iterable
from itertools import combinations
from random import Random

from tests.crossings.capability import Capability, Layout, RequestField
from tests.crossings.refusals import are_exclusive
from tests.crossings.table import TABLE

PLAIN = "full attention"  # the layout of sets that chose none
Pair = frozenset[str]


def go_together(one: Capability, other: Capability) -> bool:
    """True if one set may have both. Requests with one run beside requests with the other where none may have both."""
    return (isinstance(one, RequestField) and isinstance(other, RequestField)) or not are_exclusive(one, other)


def pairs_of(capabilities: Iterable[Capability]) -> set[Pair]:
    """The pairs that can be together, with what each needs."""
    found = combinations(capabilities, 2)
    return {frozenset((one.name, other.name)) for one, other in found if _extended([], (one, other)) is not None}


def _extended(chosen: list[Capability], more: Iterable[Capability]) -> list[Capability] | None:
    """`chosen` with `more` and what those need; None where two of them do not go together."""
    found = list(chosen)
    for one in more:
        if one in found:
            continue
        extended = _extended(found, [TABLE[name] for name in one.needs])
        if extended is None or not all(go_together(one, other) for other in extended):
            return None
        found = [*extended, one]
    return found


def with_needs(names: Iterable[str]) -> list[Capability]:
    """These capabilities, what they need, and a layout."""
    found = _extended([], [TABLE[name] for name in names])
    assert found is not None, f"some of {names} do not go together"
    return found if any(isinstance(one, Layout) for one in found) else [TABLE[PLAIN], *found]


def random_set(capabilities: list[Capability], size: int, chance: Random) -> list[Capability]:
    return _filled([], capabilities, size, chance)


def covering_sets(capabilities: list[Capability], size: int, chance: Random) -> list[list[Capability]]:
    """Sets of about `size` that have every pair at least once: each begins with a pair that none has had, and takes
    those that bring the most such pairs."""
    left = pairs_of(capabilities)
    sets: list[list[Capability]] = []
    while left:
        first = chance.choice(sorted(left, key=sorted))
        chosen = _extended([], [TABLE[name] for name in sorted(first)])
        assert chosen is not None
        while len(chosen) < size:
            others = chance.sample(capabilities, len(capabilities))
            best = max(others, key=lambda one: _gain(chosen, one, left))
            if not _gain(chosen, best, left):
                break
            chosen = _extended(chosen, [best]) or chosen
        chosen = _filled(chosen, capabilities, size, chance)
        left -= pairs_of(chosen)
        sets.append(chosen)
    return sets


def _gain(chosen: list[Capability], one: Capability, left: set[Pair]) -> int:
    if one in chosen or _extended(chosen, [one]) is None:
        return 0
    return sum(frozenset((one.name, other.name)) in left for other in chosen)


def _filled(chosen: list[Capability], capabilities: list[Capability], size: int, chance: Random) -> list[Capability]:
    for one in chance.sample(capabilities, len(capabilities)):
        if len(chosen) >= size:
            break
        chosen = _extended(chosen, [one]) or chosen
    return chosen if any(isinstance(one, Layout) for one in chosen) else [TABLE[PLAIN], *chosen]
