"""Tokens to text: the text of each token, stop strings, and the reason for the end."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quire.request import FinishReason
from quire.text.generation import Generation, TextStep
from quire.text.stop_strings import StopStrings
from tests.server.vocabulary import tokenizer

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
