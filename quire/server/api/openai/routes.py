"""The routes of the OpenAI API."""

from functools import partial
from typing import Any

from quire.server.api.openai import responses
from quire.server.api.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest, load_adapter, unload_adapter
from quire.server.api.openai.chat import chat_completions
from quire.server.api.openai.completions import completions
from quire.server.api.openai.dialect import OPENAI
from quire.server.api.openai.models import get_model, list_models
from quire.server.api.openai.requests import ChatRequest, CompletionRequest
from quire.server.api.prompts import ROLES
from quire.server.http.route import Route

CHAT_EXAMPLE = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
_COMPLETION_EXAMPLE = '{"prompt": "Once upon a time", "max_tokens": 32}'

_TOKENS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_PROMPTS = {"anyOf": [{"type": "string"}, _TOKENS, _TEXTS, {"type": "array", "items": _TOKENS, "minItems": 1}]}
PROMPT = ("prompt", _PROMPTS)


def _part(kind: str) -> dict[str, Any]:
    """A part of a message: its text is under the name of its kind."""
    properties = {"type": {"const": kind}, kind: {"type": "string"}}
    return {"type": "object", "title": f"{kind.title()}Part", "properties": properties, "required": ["type", kind]}


_PARTS = {"type": "array", "items": {"anyOf": [_part("text"), _part("refusal")]}}
_MESSAGE = {
    "type": "object",
    "title": "ChatMessage",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, _PARTS, {"type": "null"}]},
        "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    },
    "required": ["role"],
}
MESSAGES = ("messages", {"items": _MESSAGE})

_LOAD_EXAMPLE = '{"lora_name": "style", "lora_path": "style"}'
_UNLOAD_EXAMPLE = '{"lora_name": "style"}'

_get = partial(Route, "GET", dialect=OPENAI)
_adapters = partial(Route, "POST", dialect=OPENAI, media_type="text/plain", answer=(str,))
_generate = partial(Route, "POST", dialect=OPENAI, generates=True)
ROUTES = (
    _generate(
        "/v1/completions", completions, body=(CompletionRequest,), answer=(responses.Completion,),
        events=(responses.CompletionChunk, responses.OpenAIError), example=_COMPLETION_EXAMPLE, open_fields=(PROMPT,),
    ),
    _generate(
        "/v1/chat/completions", chat_completions, body=(ChatRequest,), answer=(responses.ChatCompletion,),
        events=(responses.ChatCompletionChunk, responses.OpenAIError), example=CHAT_EXAMPLE,
        open_fields=(MESSAGES,),
    ),
    _adapters("/v1/load_lora_adapter", load_adapter, body=(LoadAdapterRequest,), example=_LOAD_EXAMPLE),
    _adapters("/v1/unload_lora_adapter", unload_adapter, body=(UnloadAdapterRequest,), example=_UNLOAD_EXAMPLE),
    _get("/v1/models", list_models, answer=(responses.ModelList,), is_open=True),
    _get("/v1/models/{model}", get_model, answer=(responses.ModelCard,)),
)  # fmt: skip
