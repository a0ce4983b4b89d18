"""Tokens to text: the text of each token, stop strings, and the reason for the end."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quire.request import FinishReason
from quire.text.generation import Generation, TextStep
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer
from tests.server.vocabulary import tokenizer
from tests.text.vocabularies import byte_fallback_tokenizer

TOKENIZER = tokenizer()
END_ID = TOKENIZER.id_of("<|end|>")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def steps(batches: list[list[int]], finish: FinishReason | None, stops: list[str], **options: object) -> list[TextStep]:
    generation = Generation(TOKENIZER, StopStrings(stops) if stops else None, **options)
    found: list[TextStep] = []
    for number, batch in enumerate(batches):
        found += generation.push(batch, finish if number == len(batches) - 1 else None)
    assert generation.tokens == [step.token for step in found if step.token is not None]
    return found


@given(
    text=st.text(alphabet="abé. ", max_size=20),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=3), max_size=2),
)
def test_steps_do_not_depend_on_how_tokens_are_grouped(text: str, cuts: list[int], stops: list[str]) -> None:
    tokens = ids(text)
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    batches = [tokens[begin:end] for begin, end in pairwise(bounds)] or [[]]
    grouped = steps(batches, FinishReason.LENGTH, stops)
    assert grouped == steps([[token] for token in tokens] or [[]], FinishReason.LENGTH, stops)
    found = [text.index(stop) for stop in stops if stop in text]
    assert "".join(step.text for step in grouped) == text[: min(found, default=None)]
    assert grouped[-1].finish is (FinishReason.STOP_STRING if found else FinishReason.LENGTH)


def test_tokens_after_a_stop_string_are_dropped() -> None:
    found = steps([ids("abcabc")], None, ["bc"])
    assert [step.token for step in found] == ids("abc")
    assert found[-1].finish is FinishReason.STOP_STRING


def test_the_end_token_has_no_text_and_a_stop_token_only_where_it_is_shown() -> None:
    assert steps([ids("ab")], FinishReason.END, [], skip_special_tokens=False)[-1].text == ""
    assert steps([ids("ab")], FinishReason.STOP_TOKEN, [])[-1].text == ""
    assert steps([ids("ab")], FinishReason.STOP_TOKEN, [], shows_stop_token=True)[-1].text == "b"


def test_an_end_without_a_token_releases_the_text_that_was_held_back() -> None:
    generation = Generation(TOKENIZER, StopStrings(["abc"]))
    assert [step.text for step in generation.push(ids("ab"), None)] == ["", ""]
    assert generation.push([], FinishReason.LENGTH) == [TextStep("ab", None, FinishReason.LENGTH)]
    assert generation.push(ids("c"), None) == []


def test_with_length_first_the_last_token_ends_by_length_whatever_its_text() -> None:
    assert steps([ids("ab")], FinishReason.END, ["b"], length_first=2)[-1].finish is FinishReason.LENGTH
    assert steps([ids("ab")], FinishReason.LENGTH, ["b"], length_first=3)[-1].finish is FinishReason.STOP_STRING
    assert steps([ids("ab")], FinishReason.END, [], length_first=3)[-1].finish is FinishReason.END


@given(
    text=st.text(alphabet="abé. ", max_size=20),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    stops=st.lists(st.text(alphabet="abé.", min_size=1, max_size=3), min_size=1, max_size=2),
    min_tokens=st.integers(0, 25),
)
def test_stop_strings_that_begin_within_min_tokens_end_nothing(
    text: str, cuts: list[int], stops: list[str], min_tokens: int
) -> None:
    tokens = ids(text)
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    batches = [tokens[begin:end] for begin, end in pairwise(bounds)] or [[]]
    grouped = steps(batches, FinishReason.LENGTH, stops, min_tokens=min_tokens)
    assert grouped == steps([[token] for token in tokens] or [[]], FinishReason.LENGTH, stops, min_tokens=min_tokens)
    free = len(TOKENIZER.decode(tokens[:min_tokens]))  # half a character is one here, too
    found = [at for stop in stops if (at := text.find(stop, free)) >= 0]
    assert "".join(step.text for step in grouped) == text[: min(found, default=None)]
    assert grouped[-1].finish is (FinishReason.STOP_STRING if found else FinishReason.LENGTH)
    plain = steps([tokens], None, [])
    assert [step.text for step in grouped[:min_tokens] if step.token is not None] == [
        step.text for step in plain[:min_tokens]
    ]  # nothing is held back


def test_bytes_of_characters_within_min_tokens_are_not_searched() -> None:
    """In a vocabulary with byte fallback they are shown after the last of them."""
    tokenizer = Tokenizer(byte_fallback_tokenizer(False), {})
    tokens = tokenizer.encode("éüéa", add_special_tokens=False)
    assert len(tokens) == 7
    for min_tokens, shown in ((0, ""), (1, "éü"), (2, "éü"), (4, "éü"), (5, "éüéa"), (6, "éüéa")):
        generation = Generation(tokenizer, StopStrings(["é"]), min_tokens=min_tokens)
        assert "".join(step.text for step in generation.push(tokens, FinishReason.LENGTH)) == shown
