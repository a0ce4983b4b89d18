"""Stop strings in a stream, against a search of the whole text."""

import re
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.errors import InvalidRequest
from quire.server.api.tgi.strict import EndAnchoredStops
from quire.text.stop_strings import MAX_STOP_CHARACTERS, MAX_STOPS, Released, StopStrings, check_stops

letters = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)
# Strings that repeat themselves have the most beginnings within them.
periodic = st.builds(
    lambda part, times, end: part * times + end,
    st.text("ab", min_size=1, max_size=3),
    st.integers(0, 5),
    st.text("abc", max_size=2),
)
periodic_stops = st.lists(periodic.filter(bool), min_size=1, max_size=4)


def search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The whole text at once: the first place where a stop string begins, the shortest that begins there."""
    for start in range(len(text)):
        for stop in sorted(stops, key=len):
            if text.startswith(stop, start):
                return text[: start + len(stop) if include else start], stop
    return text, None


def stream(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    searcher = StopStrings(stops, include=include)
    said = ""
    for piece in pieces:
        released = searcher.push(piece)
        said += released.text
        if released.stop is not None:
            return said, released.stop
    released = searcher.flush()
    return said + released.text, released.stop


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted(place for place in places if place <= len(text))
    return [text[start:stop] for start, stop in zip([0, *edges], [*edges, len(text)], strict=True)]


@given(text=letters, stops=stop_lists, include=st.booleans(), places=st.lists(st.integers(0, 30), max_size=8))
@example(text="abcd", stops=["abcd", "bc"], include=False, places=[3])
@example(text="abce", stops=["abcd", "bc"], include=False, places=[3])
def test_however_the_text_is_cut_the_earliest_stop_ends_it(
    text: str, stops: list[str], include: bool, places: list[int]
) -> None:
    assert stream(cut(text, places), stops, include) == search(text, stops, include)


@given(text=letters, stops=stop_lists.filter(bool))
def test_nothing_is_held_back_but_what_may_begin_a_stop(text: str, stops: list[str]) -> None:
    searcher = StopStrings(stops)
    said = ""
    for index, character in enumerate(text):
        released = searcher.push(character)
        if released.stop is not None:
            return
        said += released.text
        held = text[len(said) : index + 1]
        assert text.startswith(said)
        assert held == "" or any(stop != held and stop.startswith(held) for stop in stops)


class Quadratic:
    """The same by looking at all of the text again after every piece."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = sorted(stops, key=len)
        self._text = ""
        self._num_released = 0

    def push(self, text: str) -> Released:
        self._text += text
        for begin in range(len(self._text) + 1):
            rest = self._text[begin:]
            found = next((stop for stop in self._stops if rest.startswith(stop)), None)
            if found is not None or any(stop.startswith(rest) for stop in self._stops):
                return Released(self._upto(begin), found)
        raise AssertionError("every stop string begins with the empty rest")

    def _upto(self, end: int) -> str:
        begin, self._num_released = self._num_released, end
        return self._text[begin:end]


@given(stops=periodic_stops, parts=st.lists(periodic, max_size=8))
@example(stops=["aab", "ab"], parts=["aaa", "aa", "b"])
@example(stops=["ababc", "ba"], parts=["abab", "abd"])
def test_every_piece_releases_what_a_search_of_all_the_text_would(stops: list[str], parts: list[str]) -> None:
    searcher, reference = StopStrings(stops), Quadratic(stops)
    for part in parts:
        expected = reference.push(part)
        assert searcher.push(part) == expected
        if expected.stop is not None:
            return


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that `work` runs: the same on every machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("stops", "piece"),
    [
        (["-" * 4095 + "b"], "-"),
        (["-" * 4095 + "b", "-" * 4000 + "c", "--d"], "-"),
        (["ab" * 2000 + "c", "ba" * 2000 + "c"], "ab"),
        (["-" * 4095 + "b"], "-" * 60),
        (["-" * 1000 + "b" + "-" * 1000], ("-" * 999 + "b") * 2),
    ],
)
def test_the_work_grows_with_the_text_and_not_with_what_is_held_back(stops: list[str], piece: str) -> None:
    def stream_of(count: int) -> Callable[[], None]:
        def work() -> None:
            searcher = StopStrings(stops)
            for _ in range(count):
                assert searcher.push(piece).stop is None

        return work

    count = 6000 // len(piece)
    counts = [lines_run(stream_of(count * times)) for times in (1, 2, 4)]
    assert all(more <= 2.3 * fewer for fewer, more in pairwise(counts))
    assert counts[-1] < 40 * len(stops) * 4 * count * len(piece)


def test_the_longest_stop_strings_cost_little_while_all_of_them_are_open() -> None:
    open_ones = ["-" * (MAX_STOP_CHARACTERS - 1) + chr(ord("a") + index) for index in range(MAX_STOPS - 1)]
    searcher = StopStrings([*open_ones, "z"])
    begun_s = time.thread_time()
    for _ in range(6000):
        assert searcher.push("-").stop is None
    assert time.thread_time() - begun_s < 10.0  # a search of the text held back, at every piece, takes minutes


def test_nothing_of_a_stop_string_is_kept_after_its_request() -> None:
    def work(number: int) -> None:
        stops = [f"{number}-{index}".ljust(MAX_STOP_CHARACTERS, "x") for index in range(MAX_STOPS)]
        searcher = StopStrings(stops)
        searcher.push(stops[0][:-1])
        EndAnchoredStops(tuple(stops)).push("x")

    work(0)
    re.purge()
    tracemalloc.start(10)
    try:
        for number in range(1, 20):
            work(number)
        kept = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    from_here = kept.filter_traces([tracemalloc.Filter(True, __file__, all_frames=True)])  # not of other threads
    assert sum(trace.size for trace in from_here.traces) < MAX_STOP_CHARACTERS


def test_stop_strings_have_limits() -> None:
    check_stops(["x" * MAX_STOP_CHARACTERS] * MAX_STOPS, MAX_STOPS)
    with pytest.raises(InvalidRequest, match=r"^stop\[1\] has 4097 characters; the limit is 4096$"):
        StopStrings(["a", "x" * (MAX_STOP_CHARACTERS + 1)])
    with pytest.raises(InvalidRequest, match=r"the number of strings in stop is 17; it must be at most 16"):
        check_stops(["a"] * 17, MAX_STOPS)


@given(
    st.lists(st.text("ab\n", max_size=3), max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3)
)
def test_stops_at_the_ends_of_tokens_are_those_of_a_pattern_with_a_dollar_sign(
    pieces: list[str], stops: list[str]
) -> None:
    searcher, seen = EndAnchoredStops(tuple(stops)), ""
    for piece in pieces:
        seen += piece
        found = next((stop for stop in stops if re.search(f"{re.escape(stop)}$", seen)), None)
        assert searcher.push(piece) == (piece, found)


def test_a_stop_across_pieces_is_left_out_or_included_as_asked() -> None:
    pieces = ["Hello", "\nUs", "er", ": hi"]
    assert stream(pieces, ["\nUser:"]) == ("Hello", "\nUser:")
    assert stream(pieces, ["\nUser:"], include=True) == ("Hello\nUser:", "\nUser:")


def test_a_stop_is_found_with_its_last_character_even_if_a_longer_one_may_follow() -> None:
    assert StopStrings(["ab", "abc"]).push("xab") == Released("x", "ab")
    # Unless one that began earlier is still open.
    searcher = StopStrings(["abcd", "bc"])
    assert searcher.push("xabc") == Released("x")
    assert searcher.push("e") == Released("a", "bc")


def test_text_after_the_stop_is_dropped() -> None:
    searcher = StopStrings(["."])
    assert searcher.push("One. Two") == Released("One", ".")
    assert searcher.push(" Three") == Released("", ".")
    assert searcher.flush() == Released("", ".")


def test_a_partial_match_is_released_when_it_fails_and_at_the_end() -> None:
    searcher = StopStrings(["</answer>"])
    assert searcher.push("a </ans") == Released("a ")
    assert searcher.push("wers") == Released("</answers")
    assert searcher.push(" </") == Released(" ")
    assert searcher.flush() == Released("</")


def test_characters_with_a_meaning_in_patterns_are_themselves() -> None:
    assert stream(["a.b", "*(c"], [".*("]) == ("a.b*(c", None)
    assert stream(["a.", "*(c"], [".*("]) == ("a", ".*(")
    assert stream(["x^y"], ["^", "$"]) == ("x", "^")


def test_an_empty_stop_string_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidRequest, match=r"stop\[1\]"):
        StopStrings(["a", ""])


def test_without_stop_strings_everything_is_released_at_once() -> None:
    searcher = StopStrings([])
    assert searcher.push("abc") == Released("abc")
    assert searcher.flush() == Released("")
