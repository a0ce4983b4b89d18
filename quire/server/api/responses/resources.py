"""The bodies and events of /v1/responses. The OpenAPI document is made of these types."""

from typing import Any, Literal, NotRequired, TypedDict

from quire.server.api.openai.responses import ChatLogprob
from quire.server.service.ledger import Timings

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokensDetails(TypedDict):
    cached_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(TypedDict):
    effort: str | None
    summary: str | None


class ResponseText(TypedDict):
    format: dict[str, Any]
    verbosity: str


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int  # seconds since 1970
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]  # the items
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None  # once it is over
    user: str | None
    timings: NotRequired[Timings]  # with timings


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]  # the items
    first_id: str | None
    last_id: str | None
    has_more: bool


# Events


class _Event(TypedDict):
    sequence_number: int


class LifecycleEvent(_Event):
    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: Response


class ItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: dict[str, Any]


class PartEvent(_Event):
    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: dict[str, Any]


class TextDeltaEvent(_Event):
    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatLogprob]
    obfuscation: NotRequired[str]  # with stream_options.include_obfuscation


class TextDoneEvent(_Event):
    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatLogprob]


class ReasoningDeltaEvent(_Event):
    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    obfuscation: NotRequired[str]


class ReasoningDoneEvent(_Event):
    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str


class CallDeltaEvent(_Event):
    type: Literal["response.function_call_arguments.delta", "response.custom_tool_call_input.delta"]
    item_id: str
    output_index: int
    delta: str
    obfuscation: NotRequired[str]


class CallDoneEvent(_Event):
    type: Literal["response.function_call_arguments.done", "response.custom_tool_call_input.done"]
    item_id: str
    output_index: int
    arguments: NotRequired[str]  # of a function
    input: NotRequired[str]  # of a custom tool


class ErrorEvent(_Event):
    type: Literal["error"]
    code: str
    message: str
    param: str | None


EVENTS = (
    LifecycleEvent, ItemEvent, PartEvent, TextDeltaEvent, TextDoneEvent, ReasoningDeltaEvent, ReasoningDoneEvent,
    CallDeltaEvent, CallDoneEvent, ErrorEvent,
)  # fmt: skip
