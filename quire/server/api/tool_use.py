"""Tools that the model may call, of every API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.grammar.answers import CallRules
from quire.server.service.served_model import ServedModel
from quire.text.tools import HERMES, Tool, format_of


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
    form = HERMES if template.tool_place is None else format_of(template.source)  # else as the system message says
    return ToolUse(rendered, CallRules(tools, form, required=required, parallel=parallel))
