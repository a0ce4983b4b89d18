"""The dialects of text-generation-inference's routes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.server.api.dialect import Dialect
from quire.server.api.openai.dialect import OPENAI, OpenAIDialect
from quire.server.api.tgi.errors import error_events, error_response
from quire.server.api.tgi.requests import Parameters
from quire.server.api.tgi.responses import TGIError


def _all(given: Any) -> Any:
    return given


def _accept(parameters: Parameters) -> None: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class TGIDialect(Dialect):
    """Rules for parameters that differ between Quire and text-generation-inference."""

    openai: OpenAIDialect = OPENAI  # of chats and completions that come through these routes
    check: Callable[[Parameters], None] = _accept  # refuses values that mean something here and nothing there
    needs_prefill_setting: bool = False  # log-probabilities of prompts only with --enable-prefill-logprobs
    needs_properties: bool = False  # at the top of a grammar's schema
    drops_details: bool = False  # on routes with plain text answers; otherwise a request for details is an error
    vertex_parameters: Callable[[Any], Any] = _all  # the parameters of an instance that count


# The stop string stays in the text: clients of these routes expect it, and cut it off themselves.
TGI = TGIDialect(error_body=TGIError, error_response=error_response, error_events=error_events, includes_stop=True)
