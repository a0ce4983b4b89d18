"""Every word of an answer is in its pieces, once, whatever the answer is made of and wherever it ends."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text import tools
from quire.text.answer_parts import AnswerForm, AnswerParser, CallArguments, CallBegins, Piece, Reasoning
from quire.text.thinking import FORMATS
from quire.text.tools import SEPARATOR, CallFormat, CallStyle

FORMS = (
    "HERMES", "MISTRAL", "MISTRAL_NAMED", "LLAMA3", "PYTHONIC", "GRANITE", "PHI4", "DEEPSEEK", "DEEPSEEK_FENCED",
    "QWEN3_CODER", "GLM", "FUNCTION_GEMMA", "GEMMA4",
)  # fmt: skip
TOOLS: dict[str, dict[str, Any]] = {"weather": {}, "now": {}, "note": {"properties": {"text": {"type": "string"}}}}
WORD = re.compile(r"w\d+w")
HARD = [
    '"',
    "'",
    "\\",
    "{",
    "}",
    "[",
    "<",
    ">",
    ",",
    ":",
    "\n",
    " ",
    "é",
    "😀",
    "</",
    "```",
    "=",
    ")",
    "|",
    "\t",
    "\u2028",
]

strings = st.lists(st.sampled_from(["WORD", "WORD", *HARD]), min_size=1, max_size=5).map("".join)
values = st.recursive(
    strings | st.sampled_from([1, -2, 3.5, True, False, None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["kWORD", "k"]), inner, max_size=2),
    max_leaves=4,
)
calls = st.lists(
    st.tuples(st.sampled_from(list(TOOLS)), st.dictionaries(st.sampled_from(["city", "text"]), values, max_size=2)),
    min_size=1, max_size=3,
)  # fmt: skip


def written(form: CallFormat, given: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of this format writes them."""
    bodies = [_body(form, name, arguments) for name, arguments in given]
    return bodies[0] if form.between is None else form.begin + form.between.join(bodies) + form.end


def _body(form: CallFormat, name: str, arguments: dict[str, Any]) -> str:
    dumped = json.dumps(arguments, ensure_ascii=False)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    match form.style:
        case CallStyle.NAMED:
            return f"{name}[ARGS]{dumped}"
        case CallStyle.SECTIONS:
            return f"{name}\n```json\n{dumped}" if form.fenced else f"{name}{SEPARATOR}{dumped}"
        case CallStyle.TAGS:
            inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
            return f"<function={name}>\n{inner}</function>"
        case CallStyle.KEYS:
            tags = (f"\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>" for key, text in texts.items())
            return f"{name}{''.join(tags)}\n"
        case CallStyle.PYTHON:
            return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        case CallStyle.MARKED:
            return f"call:{name}{_marked(arguments, form.quote)}"
    return f"{form.opening(name)}{dumped}}}"


def _marked(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_marked(item, quote) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_marked(item, quote)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def numbered(answer: str) -> str:
    """Every WORD becomes a word of its own."""
    numbers = itertools.count()
    return re.sub("WORD", lambda _: f"w{next(numbers)}w", answer)


def pieces_of(form: AnswerForm, texts: Sequence[str]) -> list[Piece]:
    """Those of one part joined."""
    parser = AnswerParser(form)
    joined: list[Any] = []
    for piece in [piece for text in texts for piece in parser.push(text)] + parser.flush():
        last = joined[-1] if joined else None
        if isinstance(piece, CallBegins) or type(last) is not type(piece):
            joined.append(piece)
        elif isinstance(piece, str):
            joined[-1] += piece
        else:
            joined[-1] = piece._replace(text=last.text + piece.text)
    return joined


def words_of(pieces: list[Piece]) -> Counter[str]:
    texts = (piece if isinstance(piece, str) else getattr(piece, "text", "") for piece in pieces)
    return Counter(WORD.findall("\0".join(texts)))


def check(form: AnswerForm, answer: str, cuts: list[int]) -> list[Piece]:
    found = pieces_of(form, [answer])
    assert words_of(found) == Counter(WORD.findall(answer))
    places = sorted(min(cut, len(answer)) for cut in cuts)
    pairs = itertools.pairwise([0, *places, len(answer)])
    assert pieces_of(form, [answer[begin:end] for begin, end in pairs]) == found
    assert pieces_of(form, list(answer)) == found
    return found


def answer_of(data: st.DataObject, form: CallFormat, thinking: Any, inside: bool) -> tuple[str, list[Any]]:
    made = data.draw(calls)
    thought = "" if thinking is None else f"{'' if inside else thinking.begin}\nWORD WORD\n{thinking.end}\n\n"
    text = "" if form.bare else data.draw(st.sampled_from(["", "WORD\n", "WORD! "]))
    return numbered(thought + text + written(form, made)), made


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), thinking=st.sampled_from([None, *FORMATS]), inside=st.booleans())
def test_every_word_of_an_answer_is_in_its_pieces_wherever_it_ends(name, data, thinking, inside):
    calls_form = getattr(tools, name)
    guided = data.draw(st.booleans())
    inside = inside and thinking is not None
    form = AnswerForm(thinking, calls_form, inside, TOOLS, guided)
    answer, made = answer_of(data, calls_form, thinking, inside)
    cuts = data.draw(st.lists(st.integers(0, 300), max_size=6))
    pieces = check(form, answer, cuts)
    begun = [piece.name for piece in pieces if isinstance(piece, CallBegins)]
    assert begun == [name for name, _ in (made[:1] if calls_form.between is None else made)]
    for piece in pieces:
        assert not isinstance(piece, CallArguments) or isinstance(json.loads(piece.text), dict)
        assert not isinstance(piece, Reasoning) or thinking is not None
    check(form, answer[: data.draw(st.integers(0, len(answer)))], cuts)
    for end in range(len(answer)):
        assert words_of(pieces_of(form, [answer[:end]])) == Counter(WORD.findall(answer[:end])), answer[:end]


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_word_of_an_answer_that_breaks_the_rules_is_in_its_pieces(name, data):
    calls_form = getattr(tools, name)
    answer, _ = answer_of(data, calls_form, None, inside=False)
    marks = [mark for each in FORMS for mark in getattr(tools, each).first_marks]
    for _ in range(data.draw(st.integers(1, 2))):
        begin = data.draw(st.integers(0, len(answer)))
        end = begin + data.draw(st.integers(0, 3))
        answer = answer[:begin] + data.draw(st.sampled_from(["", *HARD, *marks])) + answer[end:]
    answer += data.draw(st.sampled_from(["", " w999w", "\nw998w"]))
    check(AnswerForm(None, calls_form, False, TOOLS, guided=False), answer, data.draw(st.lists(st.integers(0, 300))))


@pytest.mark.parametrize(
    ("name", "answer", "arguments"),
    [
        ("PYTHONIC", r"[note(text='\ud83d\ude00 \ud83d \ude00 \ud83d\ud83d\ude00')]", "😀 � � �😀"),
        ("PYTHONIC", r"[note(text='a\'b\n\x41\q')]", "a'b\nA\\q"),
        ("GEMMA4", 'call:note{text:<|"<|"|>}<tool_call|>', None),
        ("GEMMA4", '<|tool_call>call:note{text:<|"|>a<|"b<<|"|>}<tool_call|>', 'a<|"b<'),
    ],
)
def test_strings_come_out_as_they_are_read(name, answer, arguments):
    form = AnswerForm(None, getattr(tools, name), False, TOOLS)
    for texts in ([answer], list(answer)):
        found = [json.loads(piece.text)["text"] for piece in pieces_of(form, texts) if isinstance(piece, CallArguments)]
        assert found == ([] if arguments is None else [arguments])
