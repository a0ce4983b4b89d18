"""Numbers of a schema that the library for grammars would change: it has all of them as floats of 64 bits."""

from math import copysign, floor, inf, log10, nextafter
from typing import Any, TypeGuard

from quire.errors import InvalidRequest
from quire.grammar.schema_facts import Schema

LARGEST = 2**63 - 1024  # of the floats within 64 bits, the last
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def exact_numbers(schema: Schema, place: str, strict: bool) -> Schema:
    """`schema` with numbers that are kept as they are.

    A bound becomes the nearest float within it, so that no answer breaks it. One that is excluded and whole is moved
    by a millionth of the range where the other bound is less than 1 away: the library would allow it. Raises
    InvalidRequest where a value of `const` or `enum` has no float, or a bound none within 64 bits; if it need not be
    `strict`, those are left out.
    """
    done = dict(schema)
    for key in (*_LOWER, *_UPPER):
        bound = done.get(key)
        if _is_changed(bound):
            within = _within(bound, is_lower=key in _LOWER)
            if within is not None:
                done[key] = within
            else:
                _leave_out(done, key, bound, place, strict)
    for key, others in (("exclusiveMinimum", _UPPER), ("exclusiveMaximum", _LOWER)):
        for other in others:
            if _is_number(done.get(key)) and _is_number(done.get(other)):
                done[key] = _off_whole(done[key], done[other])
    for key in ("const", "enum"):
        changed = _changed_in(done.get(key))
        if changed is not None:
            _leave_out(done, key, changed, place, strict)
    return done


def _leave_out(schema: Schema, key: str, number: int, place: str, strict: bool) -> None:
    if strict:
        raise InvalidRequest(
            f"{place}{key} has the number {str(number)[:40]}; answers cannot be held to whole numbers beyond 2**53 "
            "that are no floats of 64 bits; it can be a string"
        )
    del schema[key]


def _is_changed(value: Any) -> TypeGuard[int]:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return abs(value) > LARGEST or int(float(value)) != value


def _within(bound: int, is_lower: bool) -> int | None:
    """The nearest float that keeps it; None if it is beyond 64 bits. A bound that all such numbers keep is the last."""
    if abs(bound) > LARGEST:
        keeps_all = (bound < 0) == is_lower
        return (-LARGEST if is_lower else LARGEST) if keeps_all else None
    near = float(bound)
    if is_lower and near < bound:
        near = nextafter(near, inf)
    elif not is_lower and near > bound:
        near = nextafter(near, -inf)
    return int(near)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _off_whole(bound: float, other: float) -> float:
    """A whole `bound` that is less than 1 away from `other`, moved a little towards it."""
    size = abs(other - bound)
    if not 0 < size < 1 or bound != floor(bound):
        return bound
    moved = bound + copysign(10.0 ** (floor(log10(size)) - 6), other - bound)
    return moved if moved != bound else nextafter(bound, other)


def _changed_in(value: Any) -> int | None:
    """A number that would be changed, in a value or within it."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif _is_changed(one):
            return one
    return None
