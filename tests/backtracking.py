"""Tells patterns that `re` may backtrack over from those that it reads in linear time.

`re` tries every way to divide a text among repetitions until one matches. A pattern is linear if there is one way only:

- where a repetition may go on, the next character tells whether it does, or what was repeated is never given back, or
  what follows has no further repetition;
- within a repetition, the next character tells which alternative it is;
- where a pattern may begin anywhere (`search`, `sub` and others), the characters that a repetition takes before the
  match can still fail are none that a match begins with, so that no two attempts read the same characters.

What is refused may still be linear for a reason that this does not see.
"""

import sys
from collections.abc import Iterator, Sequence
from re import _compiler, _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
_CHARACTERS = ("LITERAL", "NOT_LITERAL", "IN", "ANY", "RANGE", "CATEGORY")
_WIDTHLESS = ("AT", "ASSERT", "ASSERT_NOT")
_SHORT = 64  # times
# ASCII, and some of each category beyond.
_ALPHABET = frozenset([*map(chr, range(128)), *"\x85\xa0éß\u017f\u212aİ٣²—\u2028\u3000语\U0001f600\ud800"])


class Reach(NamedTuple):
    """What a part of a pattern can begin with."""

    first: frozenset[str]
    is_nullable: bool  # it matches nothing too
    may_fail: bool = True
    is_short: bool = True  # it repeats nothing any number of times

    def then(self, after: "Reach") -> "Reach":
        first = self.first | after.first if self.is_nullable else self.first
        is_nullable = self.is_nullable and after.is_nullable
        return Reach(first, is_nullable, self.may_fail or after.may_fail, self.is_short and after.is_short)


_NOTHING = Reach(frozenset(), True, False)


def faults(pattern: str, flags: int, *, is_anchored: bool) -> list[str]:
    """Why `pattern` may take more than linear time. `is_anchored`: it is tried at one place of a text."""
    tree = _parser.parse(pattern, flags)
    return [*_Pattern(tree, is_anchored).faults()]


class _Pattern:
    def __init__(self, tree: Any, is_anchored: bool) -> None:
        self._state = tree.state
        self._tree = tree
        literals = {chr(value) for value in _literals(tree)}
        self._alphabet = _ALPHABET | literals | {other for one in literals for other in (one.lower(), one.upper())}
        self._begins = frozenset() if is_anchored else self._reach(tree).first

    def faults(self) -> Iterator[str]:
        yield from self._sequence(self._tree, _NOTHING, is_repeated=False)

    def _sequence(self, nodes: Sequence[Any], after: Reach, *, is_repeated: bool) -> Iterator[str]:
        for index, node in enumerate(nodes):
            rest = self._reach(nodes[index + 1 :]).then(after)
            yield from self._node(node, rest, is_repeated=is_repeated)

    def _node(self, node: Any, after: Reach, *, is_repeated: bool) -> Iterator[str]:
        kind, value = str(node[0]), node[1]
        if kind in _REPEATS:
            least, most, body = value
            own = self._reach(body)
            is_many = most > 1
            if is_many and own.is_nullable:
                yield "repeats what may be nothing"
            divides = is_repeated or not (own.is_short and after.is_short)
            if (is_many or is_repeated) and divides and kind != "POSSESSIVE_REPEAT" and least != most:
                yield from self._told_apart(own, after, "a repetition may go on or end")
            if is_many and after.may_fail and self._taken(body) & self._begins:
                yield f"a match may begin with {_some(self._taken(body) & self._begins)} that a repetition takes"
            again = own.then(after) if is_many else _NOTHING
            ends = Reach(again.first | after.first, after.is_nullable, after.may_fail, False)
            yield from self._sequence(body, ends, is_repeated=is_repeated or is_many)
        elif kind == "BRANCH":
            for index, branch in enumerate(value[1]):
                yield from self._sequence(branch, after, is_repeated=is_repeated)
                for other in value[1][index + 1 :] if is_repeated else ():
                    yield from self._told_apart(
                        self._reach(branch).then(after), self._reach(other).then(after), "two alternatives may follow"
                    )
        elif kind == "SUBPATTERN":
            if value[1] or value[2]:
                yield "changes its flags"
            yield from self._sequence(value[-1], after, is_repeated=is_repeated)
        elif kind == "ATOMIC_GROUP":
            yield from self._sequence(value, after, is_repeated=is_repeated)
        elif kind in ("ASSERT", "ASSERT_NOT"):
            if any(one in _REPEATS for one in _kinds(value[1])):
                yield "looks around over a repetition"
        elif kind not in _CHARACTERS and kind not in _WIDTHLESS:
            yield f"has {kind}"

    def _told_apart(self, one: Reach, other: Reach, what: str) -> Iterator[str]:
        if both := one.first & other.first:
            yield f"{what} before {_some(both)}"

    def _reach(self, nodes: Any) -> Reach:
        found = _NOTHING
        for node in nodes:
            found = found.then(self._reach_of(node))
        return found

    def _reach_of(self, node: Any) -> Reach:
        kind, value = str(node[0]), node[1]
        if kind in _CHARACTERS:
            return Reach(self._matched(node), False)
        if kind in _REPEATS:
            own = self._reach(value[2])
            is_nullable, may_fail = own.is_nullable or not value[0], bool(value[0]) and own.may_fail
            is_short = own.is_short and (value[1] <= 1 or value[0] == value[1] <= _SHORT)
            return Reach(own.first, is_nullable, may_fail, is_short)
        if kind == "BRANCH":
            reaches = [self._reach(branch) for branch in value[1]]
            is_nullable = any(one.is_nullable for one in reaches)
            may_fail = all(one.may_fail for one in reaches)
            is_short = all(one.is_short for one in reaches)
            return Reach(frozenset().union(*(one.first for one in reaches)), is_nullable, may_fail, is_short)
        if kind == "SUBPATTERN":
            return self._reach(value[-1])
        if kind == "ATOMIC_GROUP":
            return self._reach(value)
        return Reach(frozenset() if kind in _WIDTHLESS else self._alphabet, True)

    def _taken(self, nodes: Any) -> frozenset[str]:
        """The characters anywhere in `nodes`."""
        found: set[str] = set()
        for node in _walk(nodes):
            if str(node[0]) in _CHARACTERS:
                found |= self._matched(node)
        return frozenset(found)

    def _matched(self, node: Any) -> frozenset[str]:
        tree = _parser.SubPattern(self._state, [node])
        one = _compiler.compile(tree, self._state.flags)
        return frozenset(char for char in self._alphabet if one.fullmatch(char))


def _some(characters: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(characters)[:3]))


def _walk(nodes: Any) -> Iterator[Any]:
    """The nodes of a parsed pattern, those of sets not taken apart."""
    for node in nodes:
        yield node
        kind, value = str(node[0]), node[1]
        if kind in _REPEATS:
            yield from _walk(value[2])
        elif kind == "BRANCH":
            for branch in value[1]:
                yield from _walk(branch)
        elif kind == "SUBPATTERN":
            yield from _walk(value[-1])
        elif kind == "ATOMIC_GROUP":
            yield from _walk(value)
        elif kind in ("ASSERT", "ASSERT_NOT"):
            yield from _walk(value[1])


def _kinds(nodes: Any) -> set[str]:
    return {str(node[0]) for node in _walk(nodes)}


def _literals(nodes: Any) -> Iterator[int]:
    for node in _walk(nodes):
        kind, value = str(node[0]), node[1]
        if kind in ("LITERAL", "NOT_LITERAL"):
            yield value
        elif kind == "IN":
            for part, of_part in value:
                if str(part) == "LITERAL":
                    yield of_part
                elif str(part) == "RANGE":
                    low, high = of_part
                    yield from (point for point in (low - 1, low, high, high + 1) if 0 <= point <= sys.maxunicode)
