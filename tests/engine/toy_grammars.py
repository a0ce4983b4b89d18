"""Grammars whose every mask can be worked out by hand, and depends on every token before it."""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from quire.errors import InvalidRequest
from quire.grammar.token_rules import TokenMatcher
from quire.request import Grammar, GrammarKind, ThinkingBudget
from tests.fake_executor import VOCABULARY, Allowed, allows, bits

END = 0
STUCK = 7  # as the number of a grammar: no mask ever comes
FORCING = 100  # and more, as the number of a grammar: most tokens are the only ones, in runs of any length
MAX_FORCED = 9  # tokens that a matcher looks ahead
LOST = 8  # as the number of a grammar: fails at the third token


def toy(number: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, str(number))


def thinking_toy(number: int, end: int, max_tokens: int) -> Grammar:
    """An answer that begins with thinking, any tokens up to `end`, which comes after `max_tokens` of them at last."""
    return replace(toy(number), thinking_budget=ThinkingBudget("", str(end), True, max_tokens))


def allowed_after(grammar: Grammar, generated: Sequence[int]) -> list[int]:
    """About one token in `number`, another each time; the end after every third token."""
    if grammar.kind is GrammarKind.TOKENS:
        return _allowed_by_rules(json.loads(grammar.text), list(generated))
    if (budget := grammar.thinking_budget) is not None:
        end = int(budget.end)
        if end not in generated:
            return [end] if len(generated) >= budget.max_tokens else list(range(END + 1, VOCABULARY - 2))
        generated = generated[list(generated).index(end) + 1 :]
    number, state = int(grammar.text), hash(tuple(generated))
    if number >= FORCING and state % 8:
        return [1 + state % (VOCABULARY - 4)]
    chosen = [token for token in range(1, VOCABULARY - 2) if hash((state, token)) % number == 0]
    ends = [END] if len(generated) % 3 == 2 or not chosen else []
    return chosen + ends


def _allowed_by_rules(rules: dict[str, list], generated: list[int]) -> list[int]:
    """The tokens that complete no banned sequence."""
    allowed = range(VOCABULARY - 2) if rules["allowed"] is None else rules["allowed"]
    banned = {one[-1] for one in rules["banned"] if generated[len(generated) - len(one) + 1 :] == one[:-1]}
    return [token for token in allowed if token not in banned]


def guide(grammar: Grammar, generated: Sequence[int]) -> Allowed:
    return allows(bits(allowed_after(grammar, generated)))


class ToyMatcher:
    def __init__(self, grammars: "ToyGrammars", grammar: Grammar) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._generated: list[int] = []
        grammars.num_live += 1

    def __del__(self) -> None:
        self._grammars.num_live -= 1

    def advance(self, tokens: Sequence[int]) -> "Future[tuple[list[int], bytes]]":
        self._generated += tokens
        ahead: Future[tuple[list[int], bytes]] = Future()
        if self._grammar == toy(LOST) and len(self._generated) >= 2:
            ahead.set_exception(ValueError("the grammar is lost"))
        elif self._grammar != toy(STUCK):
            forced: list[int] = []
            while len(only := allowed_after(self._grammar, [*self._generated, *forced])) == 1 and only != [END]:
                forced += only
                if len(forced) == MAX_FORCED:
                    break
            self._generated += forced
            ahead.set_result((forced, bits(allowed_after(self._grammar, self._generated))))
        return ahead


class ToyGrammars:
    """Numbers are grammars; anything else is refused. Those given as `slow` are compiled when a test says so."""

    def __init__(self, slow: Sequence[Grammar] = ()) -> None:
        self.num_live = 0  # matchers
        self.compiling: dict[Grammar, Future[None]] = {grammar: Future() for grammar in slow}

    def prepare(self, grammar: Grammar) -> "Future[None] | None":
        compiling = self.compiling.get(grammar)
        return None if compiling is None or compiling.done() else compiling

    def matcher(self, grammar: Grammar) -> ToyMatcher | TokenMatcher:
        if grammar.kind is GrammarKind.TOKENS:
            return TokenMatcher(grammar.text, len(bits([])))
        if not grammar.text.isdecimal():
            raise InvalidRequest(f"grammar is {grammar.text!r}; it must be a number")
        return ToyMatcher(self, grammar)
