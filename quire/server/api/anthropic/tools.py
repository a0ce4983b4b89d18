"""Tools of the Anthropic API as functions."""

import json
from collections.abc import Sequence
from typing import Any

from quire.errors import invalid, shown
from quire.server.api.anthropic.requests import ChoiceAny, ChoiceNone, ChoiceTool, ToolChoice
from quire.server.api.anthropic.unknown_fields import UnknownFields

# There are no other callers and no tool search, so every tool is loaded from the start.
_FIELDS = {
    "type", "name", "description", "input_schema", "input_examples", "cache_control", "strict", "defer_loading",
    "eager_input_streaming", "allowed_callers",
}  # fmt: skip


def functions(tools: Sequence[dict[str, Any]], unknown: UnknownFields) -> list[dict[str, Any]]:
    """The tools as OpenAI describes functions. Adds the fields that are not known to `unknown`."""
    return [_function(f"tools[{index}]", tool, unknown) for index, tool in enumerate(tools)]


def _function(where: str, tool: dict[str, Any], unknown: UnknownFields) -> dict[str, Any]:
    kind, schema, description = tool.get("type"), tool.get("input_schema"), tool.get("description")
    if kind not in (None, "custom"):
        problem = f"is {shown(kind)}; the server has no tools of its own, so it must be 'custom', with an input_schema"
        raise invalid(f"{where}.type", problem)
    if not isinstance(schema, dict):
        raise invalid(f"{where}.input_schema", f"is {shown(schema)}; it must be a JSON schema")
    if schema.get("type", "object") != "object":
        raise invalid(f"{where}.input_schema.type", f"is {shown(schema['type'])}; it must be 'object'")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{where}.description", f"is {shown(description)}; it must be a string")
    callers = tool.get("allowed_callers")
    if callers is not None and callers != ["direct"]:
        raise invalid(f"{where}.allowed_callers", f"is {shown(callers)}; there are no server tools that could call it")
    unknown.note(where, tool, _FIELDS)
    described = _with_examples(where, description or "", tool.get("input_examples"))
    function = {"name": tool.get("name"), "description": described, "parameters": {"type": "object", **schema}}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _with_examples(where: str, description: str, examples: Any) -> str:
    """Append the examples to the description: templates have no field for them."""
    if not examples:
        return description
    if not isinstance(examples, list):
        raise invalid(f"{where}.input_examples", f"is {shown(examples)}; it must be a list of objects")
    written = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
    return f"{description}\n\nExamples of its input:\n{written}".lstrip()


def function_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if isinstance(choice, ChoiceTool):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, ChoiceAny):
        return "required"
    return "none" if isinstance(choice, ChoiceNone) else "auto" if choice is not None else None


def allows_parallel(choice: ToolChoice | None) -> bool:
    return choice is None or isinstance(choice, ChoiceNone) or not choice.disable_parallel_tool_use
