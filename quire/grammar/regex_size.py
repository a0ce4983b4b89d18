"""The size of a regular expression in Rust's syntax, once its repetitions are written out."""

import re

MAX_COUNT = 10**9  # sizes stay at this when they are larger
_MAX_DIGITS = 10  # of a repetition's count that are worth reading: more make a number beyond MAX_COUNT

# Possessive: two adjacent runs of whitespace would be split in every way before the match fails.
_REPEAT = re.compile(r"\{\s*+([0-9]++)\s*+(,\s*+([0-9]*+)\s*+)?\}")
_NAMED = re.compile(r"\\[pPxuU]\{[^}]{0,64}\}")  # braces that are no repetition; names are short
_FLAGS = re.compile(r"\(\?([a-zA-Z-]{1,16})[:)]")


def expanded(pattern: str) -> int:
    """The number of characters and classes in `pattern`, each as often as it is repeated; at most MAX_COUNT.

    Takes time linear in the pattern's length. Raises ValueError for what no compiler of the syntax takes; otherwise
    a pattern that is wrong is counted as well as it can be. Never counts too few of one that is right.
    """
    totals = [0]  # of each open group
    last = 0  # of what a repetition would repeat
    at, end = 0, len(pattern)
    while at < end:
        char = pattern[at]
        if char == "{":
            times, at = _repetition(pattern, at)
            totals[-1] = min(totals[-1] + last * (times - 1), MAX_COUNT)
            last = min(last * times, MAX_COUNT)
            continue
        if char == "(":
            _refuse_verbose(pattern, at)
            totals.append(0)
            last = 0
        elif char == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] = min(totals[-1] + last, MAX_COUNT)
        elif char not in "|*+?^$":
            last = 1
            totals[-1] += 1
            if char == "\\":
                at = _escape_end(pattern, at)
                continue
            if char == "[":
                at = _class_end(pattern, at)
                continue
        at += 1
    return min(sum(totals), MAX_COUNT)


def _repetition(pattern: str, at: int) -> tuple[int, int]:
    """The most times that the repetition at `at` asks for, and its end."""
    found = _REPEAT.match(pattern, at)
    if found is None:
        raise ValueError(f"the brace at {at} begins no repetition such as {{2}} or {{2,5}}; write \\{{ for a brace")
    counts = [
        int(digits[: _MAX_DIGITS + 1]) for digits in (found[1].lstrip("0"), (found[3] or "").lstrip("0")) if digits
    ]
    times = max(counts, default=0)
    if found[2] is not None and not found[3]:
        times = max(times, 1)  # no upper bound: as a star
    return min(times, MAX_COUNT), found.end()


def _refuse_verbose(pattern: str, at: int) -> None:
    flags = _FLAGS.match(pattern, at)
    if flags is not None and "x" in flags[1].partition("-")[0]:
        raise ValueError(f"the flag x at {at} (blanks and comments) is not supported")


def _escape_end(pattern: str, at: int) -> int:
    if at + 1 == len(pattern):
        raise ValueError("it ends with a backslash that escapes nothing")
    named = _NAMED.match(pattern, at)
    return at + 2 if named is None else named.end()


def _class_end(pattern: str, at: int) -> int:
    """The end of the class that opens at `at`, read as Rust reads it. Classes may hold classes."""
    opened, depth = at, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "[":
            depth += 1
            at = _class_begin(pattern, at)
        elif char == "]":
            depth -= 1
            at += 1
            if not depth:
                return at
        elif pattern[at : at + 2] in ("&&", "--", "~~"):
            at += 2
        else:
            at = _range_end(pattern, at)
    raise ValueError(f"the class that opens at {opened} is not closed")


def _class_begin(pattern: str, at: int) -> int:
    """Position after the `[` at `at` and the characters that are literal only there: dashes, or else a `]`."""
    at += 1
    if pattern.startswith("^", at):
        at += 1
    if pattern.startswith("]", at):
        return at + 1
    while pattern.startswith("-", at):
        at += 1
    return at


def _range_end(pattern: str, at: int) -> int:
    """Position after the character or the range at `at`. A range may end with any character, even a `[`."""
    at = _item_end(pattern, at)
    if pattern.startswith("-", at) and pattern[at + 1 : at + 2] not in ("", "]", "-"):
        return _item_end(pattern, at + 1)
    return at


def _item_end(pattern: str, at: int) -> int:
    return _escape_end(pattern, at) if pattern[at] == "\\" else at + 1
