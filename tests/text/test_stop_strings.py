"""Stop strings in a stream, against a search of the whole text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.errors import InvalidRequest
from quire.text.stop_strings import Released, StopStrings

letters = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


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
    assert searcher.found == "."


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
