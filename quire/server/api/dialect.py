"""The differences between servers of the same API: how a route reads requests and writes answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from quire.errors import QuireError
from quire.files.generation_defaults import GenerationDefaults
from quire.server.service.served_model import ServedModel
from quire.text.generation import StopSearch
from quire.text.stop_strings import StopStrings


@dataclass(frozen=True, eq=False, kw_only=True)
class Dialect:
    """Chosen once for each route. Each API adds fields of its own; the defaults are Quire's own way."""

    error_body: Any  # the type of error bodies
    error_response: Callable[[QuireError], Response]
    error_events: Callable[[QuireError], bytes]  # the end of a stream that fails
    streams_refusals: bool = False  # a refused stream has status 200, and the error as its only event
    uses_model_defaults: bool = True  # sampling fields that are missing come from the model's files
    includes_stop: bool = False  # stop strings stay in the text, regardless of the request
    stop_search: Callable[[Sequence[str], bool], StopSearch] = StopStrings
    length_first: bool = False  # at max_tokens the finish reason is length, even if the answer also ends otherwise

    def defaults(self, model: ServedModel) -> GenerationDefaults:
        return model.defaults if self.uses_model_defaults else GenerationDefaults()
