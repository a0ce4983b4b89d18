"""Requests of the Anthropic API as the chat requests that all APIs share."""

import re
from typing import Any

from quire.errors import invalid, shown
from quire.server.api.anthropic.conversation import Turn, TurnBuilder
from quire.server.api.anthropic.requests import (
    MessagesRequest,
    OutputFormat,
    Prompted,
    ThinkingDisabled,
    ThinkingEnabled,
)
from quire.server.api.anthropic.tools import allows_parallel, function_choice, functions
from quire.server.api.openai.requests import ChatRequest

_STOP = re.compile(r"stop(\[\d+\])?")
_TOOL = re.compile(r"(tools\[\d+\])\.function(?:\.(\w+))?")
_MESSAGE = re.compile(r"messages\[(\d+)\]")


class Translation:
    """A chat request made from one of the Anthropic API."""

    def __init__(self, fields: Prompted, max_total_tokens: int) -> None:
        """`max_total_tokens`: of the model."""
        conversation = TurnBuilder()
        conversation.add_system(fields.system)
        conversation.add_messages(fields.messages)
        tools = functions(fields.tools or [], conversation.unknown)
        self._turns = conversation.turns
        self._format_field, output_format = _output_format(fields)
        self.unknown = conversation.unknown
        self.chat = ChatRequest(
            messages=conversation.messages,
            model=fields.model,
            tools=tools or None,
            tool_choice=function_choice(fields.tool_choice),
            parallel_tool_calls=allows_parallel(fields.tool_choice),
            continue_final_message=_continues(conversation.turns) or None,
            response_format=_response_format(output_format),
            **_thinking(fields, max_total_tokens),
            **(_sampling(fields) if isinstance(fields, MessagesRequest) else {}),
        )

    def own_name(self, name: str) -> str:
        """The field of the request that a field of the chat request comes from."""
        if match := _MESSAGE.match(name):
            return self._turns[int(match[1])].place
        if match := _TOOL.match(name):
            return match[1] + {"parameters": ".input_schema", None: ""}.get(match[2], f".{match[2]}")
        if match := _STOP.fullmatch(name):
            return f"stop_sequences{match[1] or ''}"
        if name == "continue_final_message":
            return self._turns[-1].place
        if name.startswith("response_format"):
            return self._format_field
        return {"thinking_budget": "thinking.budget_tokens", "reasoning_effort": "thinking"}.get(name, name)


def _output_format(fields: Prompted) -> tuple[str, OutputFormat | None]:
    """The field that has it, and the format."""
    newer = None if fields.output_config is None else fields.output_config.format
    if newer is not None and fields.output_format is not None:
        raise invalid("output_format", "and output_config.format are both set; the latter is its newer name")
    if fields.output_format is not None:
        return "output_format.schema", fields.output_format
    return "output_config.format.schema", newer


def _response_format(given: OutputFormat | None) -> dict[str, Any] | None:
    return None if given is None else {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.schema}}


def _continues(turns: list[Turn]) -> bool:
    """True if the last message is the beginning of the answer."""
    if not turns or turns[-1].role != "assistant":
        return False
    if turns[-1].calls:
        problem = "ends with a tool_use block; the message after it must have the tool_result"
        raise invalid(turns[-1].place, problem)
    return True


def _thinking(fields: Prompted, max_total_tokens: int) -> dict[str, Any]:
    """Thinking is on where the request enables it. Otherwise it is turned off, if the template has a switch for it."""
    thinking, effort = fields.thinking, fields.output_config and fields.output_config.effort
    if isinstance(thinking, ThinkingDisabled):
        return {"reasoning_effort": "none"}
    thinks = thinking is not None
    variables: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
    if effort is not None:
        variables["reasoning_effort"] = effort
    chosen: dict[str, Any] = {"chat_template_kwargs": variables}
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens < max_total_tokens:
        chosen["thinking_budget"] = thinking.budget_tokens
    return chosen


def _sampling(fields: MessagesRequest) -> dict[str, Any]:
    if fields.max_tokens < 0:
        raise invalid("max_tokens", f"is {shown(fields.max_tokens)}; it must be at least 0")
    return {
        "temperature": fields.temperature,
        "top_k": fields.top_k,
        "top_p": fields.top_p,
        "stop": fields.stop_sequences,
        "stream": fields.stream,
        "timings": fields.timings,
        "user": fields.metadata and fields.metadata.user_id,
    }
