"""Any answer of a model is read in linear time, without an exception, and to the same end however it is cut."""

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.request import FinishReason
from quire.text.answer_parts import AnswerForm, AnswerParser, CallArguments, CallBegins, Piece
from quire.text.cut_object import complete_object
from quire.text.detokenizer import Detokenizer
from quire.text.generation import Generation
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer
from quire.text.tools import HARMONY_CALLS, PYTHONIC
from tests.text.hostile_answers import FORMS, Counted, Work, begins, cut_at, units
from tests.text.test_nothing_is_lost import pieces_of
from tests.text.vocabularies import byte_fallback_tokenizer

NUM_SAMPLES = 6  # of all ways to begin and what to repeat


def work_of(form: AnswerForm, texts: Sequence[str]) -> int:
    counted = [*map(Counted, texts)]
    parser = AnswerParser(form)
    with Work() as work:
        for text in counted:
            parser.push(text)
        parser.flush()
    return work.amount


def check_work(form: AnswerForm, begin: str, unit: str) -> None:
    """Twice the text is twice the work, in one push and in many."""
    size = 600 if form.calls is HARMONY_CALLS else 150  # characters; in harmony more than a header may have
    texts = [begin + unit * (-(-size // len(unit)) * times) for times in (1, 2, 4)]
    whole: list[int] = []
    for cuts in (whole, range(len(texts[-1]))):
        first, second, fourth = (work_of(form, cut_at(text, cuts)) for text in texts)
        assert fourth - second < 2.2 * (second - first) + 2 * len(texts[0]), (begin, unit, first, second, fourth)


@pytest.mark.parametrize("name", FORMS)
def test_the_work_of_reading_grows_as_the_text(name: str) -> None:
    form, chosen = FORMS[name], random.Random(name)
    for _ in range(NUM_SAMPLES):
        check_work(form, chosen.choice(begins(form)), chosen.choice(units(form)))


def answers(form: AnswerForm) -> st.SearchStrategy[str]:
    parts = st.sampled_from(begins(form)) | st.sampled_from(units(form)) | st.text(max_size=3)
    repeated = st.tuples(parts, st.sampled_from([1, 1, 1, 2, 70])).map(lambda one: one[0] * one[1])
    return st.lists(repeated, max_size=10).map("".join)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_answer_is_read_the_same_wherever_it_is_cut(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    answer = data.draw(answers(form))
    found = pieces_of(form, [answer])
    assert pieces_of(form, list(answer)) == found
    places = data.draw(st.lists(st.integers(0, len(answer)), max_size=8))
    assert pieces_of(form, cut_at(answer, places)) == found
    check_pieces(form, found)


def check_pieces(form: AnswerForm, pieces: list[Piece]) -> None:
    num_calls = 0
    custom: set[int] = set()
    for piece in pieces:
        if isinstance(piece, CallBegins):
            assert piece.number == num_calls
            num_calls += 1
            if piece.name in form.custom:
                custom.add(piece.number)
        elif isinstance(piece, CallArguments):
            assert piece.number == num_calls - 1
            if piece.number not in custom:
                _strict(complete_object(piece.text))
        texts = piece if isinstance(piece, str) else "".join(one for one in piece if isinstance(one, str))
        texts.encode()  # there is no half of a surrogate pair


def _strict(text: str) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert isinstance(json.loads(text, parse_constant=refuse), dict)


@cache
def byte_tokens() -> Tokenizer:
    return Tokenizer(byte_fallback_tokenizer(False), {})


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_single_bytes_make_the_same_answer_as_its_text(name: str, data: st.DataObject) -> None:
    """Tokens may end within a mark, an escape or a character, and a byte may be none of any character."""
    form, tokenizer = FORMS[name], byte_tokens()
    spelled = bytearray(data.draw(answers(form)).encode()[:200])
    for at in data.draw(st.lists(st.integers(0, 200), max_size=2)):
        spelled[at:at] = data.draw(st.sampled_from([b"\xff", b"\xc3", b"\xf0\x9f", b"\x80", b""]))
    letters = data.draw(st.sets(st.sampled_from(b'abefntu"{}[]<>|\\ ')))
    ids = [tokenizer.encode(chr(byte))[0] if byte in letters else _id_of(byte) for byte in spelled]
    whole = Detokenizer(tokenizer, continues=True)
    text = whole.push(ids) + whole.flush()
    generation = Generation(tokenizer, StopStrings(["<stop>", "\\u"]))
    texts = [step.text for id_ in ids for step in generation.push([id_], None)]
    texts += [step.text for step in generation.push([], FinishReason.LENGTH)]
    stopped = min((at for stop in ("<stop>", "\\u") if (at := text.find(stop)) >= 0), default=len(text))
    assert "".join(texts) == text[:stopped]
    assert pieces_of(form, texts) == pieces_of(form, [text[:stopped]])


@cache
def _id_of(byte: int) -> int:
    return next(id_ for id_ in range(byte_tokens().vocab_size) if byte_tokens().piece(id_) == f"<0x{byte:02X}>")


def test_a_run_of_bytes_is_decoded_once() -> None:
    """In a vocabulary with byte fallback it waits for its end."""
    tokenizer = byte_tokens()
    works = []
    for size in (200, 400, 800):
        detokenizer = Detokenizer(tokenizer)
        with Work() as work:
            for _ in range(size):
                detokenizer.push_one(_id_of(0xF0))
        assert detokenizer.flush() == "\ufffd" * size
        works.append(work.amount)
    assert works[2] - works[1] < 2.2 * (works[1] - works[0])


def test_keys_of_a_schema_are_found_without_looking_at_all_of_them() -> None:
    works = []
    for size in (1000, 2000, 4000):
        names: dict[str, Any] = {f"{'k' * 30} {number:05}": {} for number in range(size)}
        form = AnswerForm(None, PYTHONIC, tools={"f": {"properties": names}})
        parser = AnswerParser(form)
        parser.push("[f(")
        with Work() as work:
            parser.push("".join(f"{name}=1, " for name in [*names][:20]))
        works.append(work.amount)
    assert works[2] < works[0] * 1.5
