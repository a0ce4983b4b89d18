"""The routes of the OpenAI API."""

from functools import partial

from quire.server.api.openai import responses
from quire.server.api.openai.chat import chat_completions
from quire.server.api.openai.completions import completions
from quire.server.api.openai.dialect import OPENAI
from quire.server.api.openai.models import get_model, list_models
from quire.server.api.openai.requests import ChatRequest, CompletionRequest
from quire.server.http.route import Route

CHAT_EXAMPLE = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'
_COMPLETION_EXAMPLE = '{"prompt": "Once upon a time", "max_tokens": 32}'

_TOKENS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_PROMPTS = {"anyOf": [{"type": "string"}, _TOKENS, _TEXTS, {"type": "array", "items": _TOKENS, "minItems": 1}]}
PROMPT = ("prompt", _PROMPTS)

_get = partial(Route, "GET", dialect=OPENAI)
_generate = partial(Route, "POST", dialect=OPENAI, generates=True)
ROUTES = (
    _generate(
        "/v1/completions", completions, body=(CompletionRequest,), answer=(responses.Completion,),
        events=(responses.CompletionChunk, responses.OpenAIError), example=_COMPLETION_EXAMPLE, open_fields=(PROMPT,),
    ),
    _generate(
        "/v1/chat/completions", chat_completions, body=(ChatRequest,), answer=(responses.ChatCompletion,),
        events=(responses.ChatCompletionChunk, responses.OpenAIError), example=CHAT_EXAMPLE,
    ),
    _get("/v1/models", list_models, answer=(responses.ModelList,), is_open=True),
    _get("/v1/models/{model}", get_model, answer=(responses.ModelCard,)),
)  # fmt: skip
