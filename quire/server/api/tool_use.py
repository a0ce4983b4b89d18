"""Tools that the model may call, of every API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.grammar.tool_calls import calls_grammar
from quire.request import Grammar
from quire.server.service.served_model import ServedModel
from quire.text.tools import CallFormat, Tool, format_of, takes_tools


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, for the chat template and for the answer."""

    rendered: list[dict[str, Any]]  # for the template
    in_system_prompt: bool  # the template does not render tools, so the system message lists them
    form: CallFormat
    grammar: Grammar
    checked: Grammar  # the same with special tokens spelt out


def use_of_tools(
    model: ServedModel,
    rendered: list[dict[str, Any]],
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    otherwise: Grammar | None = None,
) -> ToolUse:
    """`rendered` are all tools, as templates expect them; `tools` are those that may be called. Answers that are no
    calls follow `otherwise`."""
    source = model.templates.select(with_tools=True).source
    form = format_of(source)
    special = {mark: token for mark in form.marks if (token := model.tokenizer.special_id(mark)) is not None}
    return ToolUse(
        rendered=rendered,
        in_system_prompt=not takes_tools(source),
        form=form,
        grammar=calls_grammar(tools, form, required=required, parallel=parallel, special=special, otherwise=otherwise),
        checked=calls_grammar(tools, form, required=required, parallel=parallel, otherwise=otherwise),
    )
