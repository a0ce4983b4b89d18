"""The fields of the OpenAI routes."""

from typing import Any, Literal

import msgspec

from quire.server.api.validation import Refusal


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk
    include_obfuscation: bool | None = None  # padding, so that the length of a chunk does not tell its token


class Extensions(msgspec.Struct, kw_only=True):
    """Fields beyond OpenAI's own that every generating route of it has."""

    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timings: bool | None = None
    # Constraints as vLLM, SGLang and llama.cpp name them
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None  # there is one
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | dict[str, Any] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None


class SamplingFields(Extensions, kw_only=True):
    """The fields that completions and chat completions share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | list[list[float]] | None = None  # also as pairs of a token id and a bias
    user: str | None = None
    safety_identifier: str | None = None  # the newer name of `user`
    prompt_cache_key: str | None = None  # every prompt is looked up in the prefix cache, so nothing needs this hint
    metadata: dict[str, Any] | None = None  # belongs to stored answers
    store: bool | None = None
    # The answer says "default".
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None  # beyond OpenAI's own


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tool_prompt: str | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None


def ignored_fields(fields: SamplingFields) -> list[str]:
    """Fields that request something this server does not do, but that do not change the answer."""
    found = ["store"] if fields.store else []
    if isinstance(fields, ChatRequest) and fields.verbosity not in (None, "medium"):
        found.append("verbosity")
    return found


_FUNCTIONS = "see tools and tool_choice, which took its place"

_REASONING = "thinking comes by itself, in reasoning_content, as it is generated; see thinking_budget"

_BOTH = {
    # sglang-router and vllm-router add these to every request, with the values that ask for nothing.
    "no_stop_trim": Refusal("stop strings are not part of the text; see include_stop_str_in_output", (False,)),
    "separate_reasoning": Refusal(_REASONING, (True,)),
    "stream_reasoning": Refusal(_REASONING, (True,)),
    "include_reasoning": Refusal(_REASONING, (True,)),
    "return_hidden_states": Refusal("hidden states are not part of answers", (False,)),
    "use_beam_search": Refusal("beam search is not supported", (False,)),
    "length_penalty": Refusal("beam search is not supported", (1, 1.0)),
    "structural_tag": Refusal("structural tags are not supported; see tools, or write a grammar"),
    "truncate_prompt_tokens": Refusal("prompts are not cut; send fewer tokens"),
}

COMPLETION_REFUSALS = _BOTH | {"suffix": Refusal("filling in before a suffix is not supported", ("",))}

CHAT_REFUSALS = _BOTH | {
    "functions": Refusal(_FUNCTIONS, ([],)),
    "function_call": Refusal(_FUNCTIONS, ("none", "auto")),
    "audio": Refusal("only text is supported"),
    "modalities": Refusal("only text is supported", (["text"], [])),
    "prediction": Refusal("predicted outputs are not supported"),
    "web_search_options": Refusal("there is no web search"),
    "echo": Refusal("a conversation is not repeated; see continue_final_message", (False,)),
    "chat_template": Refusal("the server chooses the template; see --chat-template"),
}
