"""Any grammar through the limits and the checker: followed, or refused for a reason, at a bounded cost."""

import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidRequest
from quire.grammar.checking import GrammarChecking
from quire.grammar.limits import refuse_what_explodes
from quire.request import Grammar, GrammarKind
from tests.patience import WAIT_S
from tests.text.grammar_fuzzing import patterns, schema_texts

MAX_CPU_S = 2.0  # for an input of 256 KB, on any machine
grammars = st.builds(Grammar, st.just(GrammarKind.REGEX), patterns) | st.builds(
    Grammar, st.just(GrammarKind.JSON_SCHEMA), schema_texts
)


@pytest.fixture(scope="module")
def checking() -> Iterator[GrammarChecking]:
    one = GrammarChecking()
    yield one
    one.close()


def refusal_of(grammar: Grammar) -> str | None:
    try:
        refuse_what_explodes("grammar", grammar)
    except InvalidRequest as refused:
        return refused.message
    return None


@given(grammars)
def test_the_limits_refuse_or_pass_every_grammar_at_a_bounded_cost(grammar: Grammar) -> None:
    begun_s = time.thread_time()
    refusal = refusal_of(grammar)
    assert time.thread_time() - begun_s < MAX_CPU_S
    assert refusal is None or (refusal.startswith("grammar") and len(refusal) < 500)


@settings(max_examples=settings.default.max_examples // 2)
@given(grammars)
def test_the_checker_has_a_verdict_on_every_grammar_that_passes_the_limits(
    checking: GrammarChecking, grammar: Grammar
) -> None:
    if refusal_of(grammar) is None:
        verdict = checking.submit(grammar).result(WAIT_S)
        assert verdict is None or 0 < len(verdict) <= 500
    checking.check()
