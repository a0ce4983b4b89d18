"""The tools that the model may call, for every API."""

import secrets
import string
from dataclasses import dataclass
from typing import Any

from quire.grammar.answers import CallRules
from quire.text.answer_parts import AnswerForm
from quire.text.tools import CALL_ID_LENGTH

_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, for the chat template and for the answer."""

    rendered: list[dict[str, Any]]  # all tools, for the template
    calls: CallRules


def new_call_id(form: AnswerForm, prefix: str) -> str:
    """An id for a call, of the length that the model's template insists on; then without `prefix`."""
    length = CALL_ID_LENGTH if form.calls is None else form.calls.id_length
    characters = "".join(secrets.choice(_CHARACTERS) for _ in range(length))
    return characters if length < CALL_ID_LENGTH else prefix + characters
