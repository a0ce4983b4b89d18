"""The bodies of the OpenAI routes' answers. The OpenAPI document is made of these types."""

from typing import Literal, NotRequired, TypedDict

from quire.server.service.ledger import Timings

# The last two, in place of "stop", with --tgi-strict.
FinishReason = Literal["stop", "length", "tool_calls", "stop_sequence", "eos_token"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]  # not with --tgi-strict
    completion_tokens_details: NotRequired[CompletionTokensDetails]  # of models that think


class Head(TypedDict):
    """The first fields of every answer and every chunk."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion"]
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str
    service_tier: NotRequired[Literal["default"]]  # where the request has it


# Chats


class FunctionCall(TypedDict):
    name: str
    arguments: str  # JSON


class CustomCall(TypedDict):
    name: str
    input: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function", "custom"]
    function: NotRequired[FunctionCall]
    custom: NotRequired[CustomCall]


class MessageContent(TypedDict):
    content: str | None
    reasoning_content: NotRequired[str]  # the model's thinking
    tool_calls: NotRequired[list[ToolCall]]


class Message(MessageContent):
    role: Literal["assistant"]
    refusal: NotRequired[None]  # not with --tgi-strict


class ScoredToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ScoredToken):
    top_logprobs: list[ScoredToken]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]  # with return_token_ids


class ChatCompletion(Head):
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]  # with return_token_ids
    timings: NotRequired[Timings]  # with timings


class FunctionCallPart(TypedDict):
    name: NotRequired[str]
    arguments: str


class CustomCallPart(TypedDict):
    name: NotRequired[str]
    input: str


class ToolCallPart(TypedDict):
    """The first of a call has its id and its name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionCallPart]
    custom: NotRequired[CustomCallPart]


class MessagePart(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallPart]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: MessagePart
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]  # with return_token_ids


class ChatCompletionChunk(Head):
    choices: list[ChatChunkChoice]  # none in the one that has the usage or the timings
    usage: NotRequired[Usage | None]  # with stream_options.include_usage or continuous_usage_stats
    obfuscation: NotRequired[str]  # with stream_options.include_obfuscation
    timings: NotRequired[Timings]  # with timings


# Completions


class CompletionLogprobs(TypedDict):
    """Columns. The first token of a prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """A choice of a whole answer or of a chunk. Only the last chunk has a finish reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | Literal[""] | None  # "": not the last, with --tgi-strict
    token_ids: NotRequired[list[int]]  # with return_token_ids
    prompt_token_ids: NotRequired[list[int]]


class Completion(Head):
    choices: list[CompletionChoice]
    usage: Usage
    timings: NotRequired[Timings]  # with timings


class CompletionChunk(Head):
    choices: list[CompletionChoice]  # none in the one that has the usage or the timings
    usage: NotRequired[Usage | None]  # with stream_options.include_usage or continuous_usage_stats
    obfuscation: NotRequired[str]  # with stream_options.include_obfuscation
    timings: NotRequired[Timings]  # with timings


# Models and errors


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: NotRequired[int]  # not with --tgi-strict
    parent: NotRequired[str]  # of an adapter: the name of the model


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "rate_limit_error",
    "service_unavailable_error",
    "server_error",
]


class ErrorDetails(TypedDict):
    message: str
    type: ErrorType
    param: str | None  # the field that is wrong
    code: str | None


class OpenAIError(TypedDict):
    error: ErrorDetails
