"""Tools that the model may call, of every API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.grammar.answers import CallRules
from quire.server.service.served_model import ServedModel
from quire.text.tools import Tool, format_of, takes_tools


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, for the chat template and for the answer."""

    rendered: list[dict[str, Any]]  # for the template
    in_system_prompt: bool  # the template does not render tools, so the system message lists them
    calls: CallRules


def use_of_tools(
    model: ServedModel, rendered: list[dict[str, Any]], tools: Sequence[Tool], *, required: bool, parallel: bool
) -> ToolUse:
    """`rendered` are all tools, as templates expect them; `tools` are those that may be called."""
    source = model.templates.select(with_tools=True).source
    calls = CallRules(tools, format_of(source), required=required, parallel=parallel)
    return ToolUse(rendered, not takes_tools(source), calls)
