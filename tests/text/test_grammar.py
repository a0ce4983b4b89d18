"""Grammars over the tokens of real vocabularies."""

import json
import random
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from quire.engine.grammar_masks import Guided
from quire.errors import InvalidRequest
from quire.grammar.gbnf import lark_of_gbnf
from quire.grammar.limits import MAX_EXPANDED, refuse_what_explodes
from quire.grammar.matcher import GrammarMatcher, Grammars, compile_grammar, tokens_of
from quire.grammar.regex_size import expanded
from quire.request import Grammar, GrammarKind, choice
from quire.text.tokenizer import Tokenizer
from tests.patience import WAIT_S
from tests.server import vocabulary
from tests.text import vocabularies
from tests.text.token_ids import named_id

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 199}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def schema(document: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(document))


def allowed(mask: bytes) -> list[int]:
    number = int.from_bytes(mask, "little")
    return [token for token in range(8 * len(mask)) if number >> token & 1]


def written(tokenizer: Tokenizer, end_ids: Sequence[int], grammar: Grammar, seed: int) -> tuple[str, bool]:
    """A random walk through a grammar: its text, and whether it came to an end."""
    chance = random.Random(seed)
    guided = Guided(Grammars(lambda: tokenizer, end_ids, tokenizer.vocab_size + 40).matcher(grammar), 0, ())
    tokens: list[int] = []
    for _ in range(60):
        choice = allowed(guided.mask(len(tokens), WAIT_S))
        assert choice, "nothing may follow, not even an end"
        tokens.append(chance.choice(choice))
        if tokens[-1] in end_ids:
            return tokenizer.decode(tokens[:-1]), True
        guided.append(tokens[-1:])
    return tokenizer.decode(tokens), False


@pytest.mark.parametrize("pattern", ["[a-c]{2,5}", "(ab|ba)+\\.", "a[0-9é]*!", "\\d{3}(,[A-K])?"])
def test_whatever_is_chosen_among_what_is_allowed_matches(pattern):
    for seed in range(8):
        text, ended = written(vocabulary.tokenizer(), [0], regex(pattern), seed)
        assert re.fullmatch(pattern, text) if ended else len(text) > 20


@pytest.mark.parametrize(
    ("backend", "end"),
    [
        (vocabularies.byte_level_original("smollm"), "<|im_end|>"),
        (vocabularies.byte_level_original("llama-bpe"), "<|im_end|>"),
        (vocabularies.byte_fallback_tokenizer(), "</s>"),
        (vocabularies.byte_fallback_tokenizer(prefixed=False), "</s>"),
        (vocabularies.metaspace_tokenizer(), "</s>"),
        (vocabularies.metaspace_tokenizer(prefixed=False), "</s>"),
    ],
)
def test_json_follows_its_schema_in_every_kind_of_vocabulary(backend, end):
    tokenizer = Tokenizer(backend, {"eos_token": end})
    for seed in range(6):
        text, ended = written(tokenizer, [named_id(tokenizer, "eos_token")], schema(SCHEMA), seed)
        assert ended
        document = json.loads(text)
        assert document["name"] in ("ann", "bob")
        assert 0 <= document["age"] <= 199
        assert list(document) == ["name", "age"]


def test_every_end_token_ends_and_none_comes_too_early():
    tokenizer = Tokenizer(vocabularies.byte_level_original("smollm"), {"eos_token": "<|im_end|>"})
    ends = [tokenizer.id_of(name) for name in ("<|endoftext|>", "<|im_end|>")]
    matcher = Grammars(lambda: tokenizer, ends, tokenizer.vocab_size).matcher(regex("ab?"))
    guided = Guided(matcher, 0, ())
    assert not set(ends) & set(allowed(guided.mask(0, WAIT_S)))
    guided.append(tokenizer.encode("a"))
    assert set(allowed(guided.mask(1, WAIT_S))) == {*ends, *tokenizer.encode("b")}
    guided.append(tokenizer.encode("b"))
    assert allowed(guided.mask(2, WAIT_S)) == sorted(ends)


class OneThread:
    """A matcher that takes its time and, like the library's, refuses a second thread meanwhile."""

    def __init__(self):
        self.seen, self.go_on = [], threading.Event()
        self._in_use = threading.Lock()

    def consume_tokens(self, tokens):
        assert self._in_use.acquire(blocking=False), "a second thread"
        self.go_on.wait(WAIT_S)
        self.seen += tokens
        self._in_use.release()

    def is_stopped(self):
        return True

    def try_consume_tokens(self, _):
        return 0

    def compute_bitmask(self):
        return b""

    def is_error(self):
        return False


def test_tokens_that_come_before_the_mask_is_there_take_effect_in_their_order():
    slow = OneThread()
    with ThreadPoolExecutor(4) as pool:
        matcher = GrammarMatcher(slow, pool, 8, ())
        advanced = [matcher.advance([token]) for token in range(4)]
        assert wait(advanced, 0.1).not_done == set(advanced)
        slow.go_on.set()
        assert [one.result(WAIT_S) for one in advanced] == [([], bytes(8))] * 4
    assert slow.seen == [0, 1, 2, 3]


def test_answers_with_one_grammar_go_their_own_ways():
    grammars = Grammars(vocabulary.tokenizer, [0], 50)
    assert grammars.prepare(regex("aa|bb")) is not None
    first, second, third = (Guided(grammars.matcher(regex("aa|bb")), 0, ()) for _ in range(3))
    assert grammars.prepare(regex("aa|bb")) is None
    a, b = vocabulary.tokenizer().encode("ab")
    for at in range(2):
        first.append([a])
        second.append([b])
        first_mask, second_mask = first.mask(at + 1, WAIT_S), second.mask(at + 1, WAIT_S)
    assert allowed(first_mask) == allowed(second_mask) == [0]
    third.append([a])
    assert allowed(third.mask(1, WAIT_S)) == [a]
    wrong = grammars.matcher(regex("aa|bb"))
    with pytest.raises(InvalidRequest, match="doesn't satisfy"):
        wrong.advance([a, b]).result()


LONG_KEYS = {
    "type": "object",
    "properties": {"favourite_colour": {"enum": ["dark green", "dark blue"]}, "is_active": {"type": "boolean"}},
    "required": ["favourite_colour", "is_active"],
}
GRAMMARS = [
    schema(LONG_KEYS),
    schema(LONG_KEYS | {"x-guidance": {"whitespace_pattern": ""}}),
    schema({"const": "a long text and so on"}),
    regex("(one|only) way to go on after th(is|at)!"),
    choice(["yes, of course", "yes, certainly", "no"]),
    Grammar(GrammarKind.LARK, lark_of_gbnf('root ::= "answer: " ("yes" | "no") " and out"')),
]


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize(
    ("backend", "end"),
    [
        *((vocabularies.byte_level_original(name), "<|im_end|>") for name in ("smollm", "llama-bpe", "qwen2")),
        (vocabularies.byte_fallback_tokenizer(), "</s>"),
    ],
)
def test_a_forced_token_is_the_only_one_that_its_mask_allows(backend, end, grammar):
    """So answers are the same whether they are sampled one by one or not."""
    tokenizer = Tokenizer(backend, {"eos_token": end})
    end = named_id(tokenizer, "eos_token")
    grammars = Grammars(lambda: tokenizer, [end], tokenizer.vocab_size)
    plain = tokens_of(tokenizer, [end])
    num_forced = 0
    for seed in range(4):
        chance, tokens, guided = random.Random(seed), [], Guided(grammars.matcher(grammar), 0, ())
        one_by_one = compile_grammar(grammar, plain)
        while True:
            mask = guided.mask(len(tokens), WAIT_S)
            assert allowed(mask) == allowed(one_by_one.compute_bitmask()[: len(mask)])
            num_forced += bool(guided.forced())
            tokens.append(chance.choice(allowed(mask)))
            if tokens[-1] == end:
                break
            guided.append(tokens[-1:])
            one_by_one.consume_token(tokens[-1])
    assert num_forced > 3


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (regex("(a"), "invalid regex"),
        (regex("a(?=b)"), "invalid regex"),
        (schema({"type": "nothing"}), "type"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"$ref": "http://127.0.0.1/other.json"}), "127.0.0.1"),
        (schema(False), "object"),
    ],
)
def test_what_is_no_grammar_is_refused(grammar, why):
    with pytest.raises(InvalidRequest, match=why):
        Grammars(vocabulary.tokenizer, [0], 50).matcher(grammar)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}", 3),
        ("a{3,}b", 4),
        ("a{2,7}", 7),
        ("(ab){10}c", 21),
        ("((a{10}){10}){10}", 1000),
        ("[a{9}]{3}", 3),
        (r"[\]a{9}]{3}", 3),
        (r"\p{L}{4}\x{1F600}", 5),
        (r"\{5}", 3),
        (r"a\{5\}", 4),
        ("(a|b){5}", 10),
        ("a{0}", 0),
        ("(?:x*){1000}", 2000),
    ],
)
def test_what_a_regular_expression_stands_for_is_counted(pattern, size):
    assert expanded(pattern) == size


@pytest.mark.parametrize(
    "grammar",
    [
        regex("x{1000000}"),
        regex("(a{1000}){1000}"),
        regex("y" * (MAX_EXPANDED + 1)),
        schema({"type": "string", "pattern": "^(a{1000}){1000}$"}),
        schema({"items": [{"patternProperties": {"x{99999}": {}}}]}),
        schema({"const": "x" * 5000}),
        schema({"enum": ["a", "x" * 5000]}),
        schema({"enum": ["x" * 100] * 4000}),
    ],
)
def test_what_is_larger_than_it_looks_is_refused(grammar):
    with pytest.raises(InvalidRequest, match=r"^response_format.*the limit is \d+"):
        refuse_what_explodes("response_format", grammar)
