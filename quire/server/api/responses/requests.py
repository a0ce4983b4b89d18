"""The fields of /v1/responses."""

from typing import Any, Literal

import msgspec

from quire.server.api.openai.requests import Extensions
from quire.server.api.validation import Refusal

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Of tools and inputs that do not occur here, so there is nothing to include.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    # The whole thinking is in the answer, so a summary would add nothing.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name


class TextConfig(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # padding, so that the length of an event does not tell its token


class ResponseRequest(Extensions, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    include: list[Includable] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of hosted tools, of which there are none
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None  # every prompt is looked up in the prefix cache, so nothing needs this hint
    reasoning: Reasoning | None = None
    safety_identifier: str | None = None  # the newer name of `user`
    # The answer says "default".
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    # Beyond OpenAI's own fields, as in chat completions
    chat_template_kwargs: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | list[list[float]] | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    thinking_budget: int | None = None


# Fields that a chat has by the same name.
SAME_IN_CHATS = (
    "model", "temperature", "top_p", "parallel_tool_calls", "user", "safety_identifier", "chat_template_kwargs",
    "frequency_penalty", "logit_bias", "presence_penalty", "seed", "stop", "thinking_budget",
    *Extensions.__struct_fields__,
)  # fmt: skip

_CACHE = "how long prompts are cached is the server's choice"
REFUSALS = {
    "access_programs": Refusal("there are no such programs", ({},)),
    "context_management": Refusal("conversations are not compacted; see truncation", ([],)),
    "conversation": Refusal("there are no conversations; see previous_response_id"),
    "image": Refusal("only text is supported", ({},)),
    "logprobs": Refusal("see include, which can say the same", (False,)),
    "max_completion_tokens": Refusal("see max_output_tokens"),
    "max_tokens": Refusal("see max_output_tokens"),
    "messages": Refusal("see input, or send this to /v1/chat/completions"),
    "moderation": Refusal("answers are not moderated"),
    "n": Refusal("a response has one answer", (1,)),
    "prompt": Refusal("there are no prompt templates; see input and instructions"),
    "prompt_cache_options": Refusal(_CACHE, ({}, {"mode": "implicit"})),
    "prompt_cache_retention": Refusal(_CACHE, ("in_memory",)),
    "reasoning_effort": Refusal("see reasoning.effort"),
    "response_format": Refusal("see text.format"),
    "return_token_ids": Refusal("see /v1/chat/completions, which has them", (False,)),
    "verbosity": Refusal("see text.verbosity"),
}
REASONING_REFUSALS = {
    "context": Refusal("the chat template decides which thinking stays in a conversation", ("auto",)),
    "mode": Refusal("there are no modes", ("standard",)),
}
