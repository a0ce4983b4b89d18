"""One prompt of a request, with the rules that turn its tokens into text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.request import Grammar, Request
from quire.text.generation import StopSearch
from quire.text.stop_strings import StopStrings


class NamedGrammar(NamedTuple):
    """A grammar, and the field of the request that gives it."""

    field: str
    grammar: Grammar
    part: "NamedGrammar | None" = None  # another field that contributes; it is named in errors about its part

    def renamed(self, own_name: Callable[[str], str]) -> "NamedGrammar":
        part = None if self.part is None else self.part.renamed(own_name)
        return NamedGrammar(own_name(self.field), self.grammar, part)


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """The service chooses the id, the salt and the time limits of `request`."""

    request: Request
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # the stop string, or stop token, is part of the text
    skip_special_tokens: bool = True
    stop_search: Callable[[Sequence[str], bool], StopSearch] = StopStrings  # of `stop` and `include_stop`
    length_first: bool = False  # at max_tokens the finish reason is length, even if the answer also ends otherwise
    unchecked_grammar: NamedGrammar | None = None  # to be checked before the engine gets the request
    draws_seed: bool = False  # the service chooses the seed as well: the client names none
