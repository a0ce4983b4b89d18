"""The bodies and events of the Anthropic routes' answers. The OpenAPI document is made of these types."""

from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from quire.server.service.ledger import Timings

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokensDetails(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """The prompt has the three kinds of input tokens together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokensDetails
    service_tier: NotRequired[Literal["standard"]]


class AppliedEdits(TypedDict):
    applied_edits: list[dict[str, Any]]


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None  # null in message_start
    stop_sequence: str | None
    usage: MessageUsage
    context_management: NotRequired[AppliedEdits]  # where the request has it
    timings: NotRequired[Timings]  # with timings


# Events


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: AnthropicMessage


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockChange = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockChange


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


BlockEvent = BlockStart | BlockDelta | BlockStop


class StopDelta(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage
    context_management: NotRequired[AppliedEdits]
    timings: NotRequired[Timings]


class MessageStop(TypedDict):
    type: Literal["message_stop"]


class Ping(TypedDict):
    type: Literal["ping"]


# Other answers


class OriginalTokens(TypedDict):
    original_input_tokens: int


class TokenCount(TypedDict):
    input_tokens: int
    context_management: NotRequired[OriginalTokens]  # where the request has it


class AnthropicModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(TypedDict):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
]


ErrorCode = Literal["thread_unsupported_request"]


class ErrorCause(TypedDict):
    error_code: ErrorCode


class ErrorMessage(TypedDict):
    type: ErrorType
    message: str
    details: NotRequired[ErrorCause]


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: ErrorMessage
    request_id: str
