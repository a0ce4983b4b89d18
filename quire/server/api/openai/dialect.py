"""The dialects of the OpenAI routes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire import __version__
from quire.request import FinishReason as Finish
from quire.server.api.dialect import Dialect
from quire.server.api.openai.errors import error_events, error_response
from quire.server.api.openai.requests import ignored_fields
from quire.server.api.openai.responses import FinishReason, OpenAIError

FINISH_REASONS: dict[Finish, FinishReason] = {
    Finish.END: "stop",
    Finish.STOP_TOKEN: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
}


def _as_given(fields: Any) -> tuple[Any, list[str]]:
    return fields, ignored_fields(fields)


@dataclass(frozen=True, eq=False, kw_only=True)
class OpenAIDialect(Dialect):
    """Details of answers that differ between OpenAI and text-generation-inference."""

    read: Callable[[Any], tuple[Any, list[str]]] = _as_given  # the fields in use, and the names of ignored ones
    completion_max_tokens: int | None = 16  # default of max_tokens, as OpenAI documents it; None: as many as fit
    chat_finish_reasons: Mapping[Finish, FinishReason]
    completion_finish_reasons: Mapping[Finish, FinishReason]
    completion_unfinished: Literal[""] | None = None  # the finish reason before the last chunk
    repeats_role: bool = False  # every chunk of a chat names the role, not only the first
    has_details: bool = True  # an id, cached_tokens, refusal, max_model_len
    fingerprint: str = f"quire-{__version__}"


OPENAI = OpenAIDialect(
    error_body=OpenAIError,
    error_response=error_response,
    error_events=error_events,
    chat_finish_reasons=FINISH_REASONS,
    completion_finish_reasons=FINISH_REASONS,
)
