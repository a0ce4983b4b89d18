"""Tools that the model may call, of every API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.grammar.answers import CallRules
from quire.server.service.served_model import ServedModel
from quire.text.tools import Tool


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, for the chat template and for the answer."""

    rendered: list[dict[str, Any]]  # for the template
    calls: CallRules


def use_of_tools(
    model: ServedModel, rendered: list[dict[str, Any]], tools: Sequence[Tool], *, required: bool, parallel: bool
) -> ToolUse:
    """`rendered` are all tools, as templates expect them; `tools` are those that may be called."""
    template = model.templates.select(with_tools=True)
    return ToolUse(rendered, CallRules(tools, template.call_format, required=required, parallel=parallel))
