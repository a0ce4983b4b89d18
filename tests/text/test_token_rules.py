"""Rules about tokens: masks that can be worked out by hand."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidRequest
from quire.grammar.matcher import Grammars
from quire.request import GrammarKind, Request, token_rules
from tests.server.vocabulary import tokenizer

VOCABULARY = 40
WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5)


def allowed_after(generated: Sequence[int], allowed: Sequence[int] | None, banned: Sequence[Sequence[int]]) -> set[int]:
    """As vLLM has it: the last token of a word is forbidden after the others."""
    found = set(range(VOCABULARY)) if allowed is None else set(allowed)
    for word in banned:
        *first, last = word
        if list(generated[len(generated) - len(first) :]) == first and len(generated) >= len(first):
            found.discard(last)
    return found


@given(st.none() | st.lists(st.integers(0, VOCABULARY - 1), min_size=1), WORDS, st.lists(st.lists(st.integers(0, 3))))
def test_masks_are_those_of_the_rules_however_tokens_come(allowed, banned, steps):
    matcher = Grammars(tokenizer, [0], VOCABULARY).matcher(token_rules(allowed, banned))
    generated: list[int] = []
    for new in steps:
        generated += new
        forced, bits = matcher.advance(new).result(0)
        assert not forced
        mask = int.from_bytes(bits, "little")
        right = allowed_after(generated, allowed, banned)
        assert {token for token in range(VOCABULARY) if mask >> token & 1} == right


def test_rules_about_tokens_leave_ends_alone_and_need_nothing_compiled():
    grammar = token_rules([1, 2])
    assert grammar.kind is GrammarKind.TOKENS
    assert Grammars(tokenizer, [0], VOCABULARY).prepare(grammar) is None
    Request(1, (1,), 5, grammar=grammar, ignore_end=True, min_tokens=3)


def test_tokens_beyond_the_vocabulary_are_refused():
    for rules in (token_rules([99]), token_rules(None, [[1, 99]]), token_rules([-1])):
        with pytest.raises(InvalidRequest, match="grammar names the token"):
            Grammars(tokenizer, [0], VOCABULARY).matcher(rules)
