"""The fields of the Anthropic routes."""

from typing import Any, Literal

import msgspec

from quire.server.api.validation import Refusal


class Metadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None  # is written to the log line of the request


class ThinkingEnabled(msgspec.Struct, kw_only=True, tag_field="type", tag="enabled", forbid_unknown_fields=True):
    budget_tokens: int
    display: Literal["summarized", "omitted"] | None = None  # omitted: thinking blocks without their text


class ThinkingAdaptive(msgspec.Struct, kw_only=True, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(msgspec.Struct, kw_only=True, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    pass


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class ChoiceAuto(msgspec.Struct, kw_only=True, tag_field="type", tag="auto", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class ChoiceAny(msgspec.Struct, kw_only=True, tag_field="type", tag="any", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool | None = None


class ChoiceTool(msgspec.Struct, kw_only=True, tag_field="type", tag="tool", forbid_unknown_fields=True):
    name: str
    disable_parallel_tool_use: bool | None = None


class ChoiceNone(msgspec.Struct, kw_only=True, tag_field="type", tag="none", forbid_unknown_fields=True):
    pass


ToolChoice = ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone


class OutputFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ThinkingKept(
    msgspec.Struct, kw_only=True, tag_field="type", tag="clear_thinking_20251015", forbid_unknown_fields=True
):
    keep: Literal["all"]  # nothing is cleared; the chat template chooses


class ContextManagement(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    edits: list[ThinkingKept] = []


class Prompted(msgspec.Struct, kw_only=True):
    """The fields that a prompt is made of."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None  # every prompt is cached
    speed: Literal["standard", "fast"] | None = None
    user_profile_id: str | None = None


class CountTokensRequest(Prompted, kw_only=True):
    pass


class MessagesRequest(Prompted, kw_only=True):
    max_tokens: int
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # the answer's usage says "standard"
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    timings: bool | None = None  # beyond Anthropic's own fields


REFUSALS = {
    "mcp_servers": Refusal("the server calls no other servers; call the tools in the client", ([],)),
    "container": Refusal("there are no containers"),
    "compaction": Refusal("conversations are not compacted"),
    "diagnostics": Refusal("requests are not compared", ({"previous_message_id": None}, {})),
    "fallbacks": Refusal("there is one model", ([],)),
    "fallback_credit_token": Refusal("there is one model"),
    "inference_geo": Refusal("requests are not sent to other places", ("global",)),
    "thread": Refusal("conversations are not stored"),
}
