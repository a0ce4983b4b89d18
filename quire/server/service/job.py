"""What a request asks of the service."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.request import Request
from quire.text.generation import StopSearch
from quire.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One prompt and how its answer becomes text. The service chooses the request's id."""

    request: Request
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # the stop string, or stop token, is part of the text
    skip_special_tokens: bool = True
    stop_search: Callable[[Sequence[str], bool], StopSearch] = StopStrings  # of the strings, and `include_stop`
    length_first: bool = False  # at max_tokens the answer ends by its length, whatever its text ends with
