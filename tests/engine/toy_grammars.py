"""Grammars whose every mask can be worked out by hand, and depends on every token before it."""

from collections.abc import Sequence
from concurrent.futures import Future

from quire.errors import InvalidRequest
from quire.request import Grammar, GrammarKind
from tests.fake_executor import VOCABULARY, Allowed, allows, bits

END = 0
STUCK = 7  # as the number of a grammar: no mask ever comes
FORCING = 100  # and more, as the number of a grammar: most tokens are the only ones, in runs of any length
MAX_FORCED = 9  # tokens that a matcher looks ahead
LOST = 8  # as the number of a grammar: fails at the third token


def toy(number: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, str(number))


def allowed_after(grammar: Grammar, generated: Sequence[int]) -> list[int]:
    """About one token in `number`, another each time; the end after every third token."""
    number, state = int(grammar.text), hash(tuple(generated))
    if number >= FORCING and state % 8:
        return [1 + state % (VOCABULARY - 4)]
    chosen = [token for token in range(1, VOCABULARY - 2) if hash((state, token)) % number == 0]
    ends = [END] if len(generated) % 3 == 2 or not chosen else []
    return chosen + ends


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

    def matcher(self, grammar: Grammar) -> ToyMatcher:
        if not grammar.text.isdecimal():
            raise InvalidRequest(f"grammar is {grammar.text!r}; it must be a number")
        return ToyMatcher(self, grammar)
