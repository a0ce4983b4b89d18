"""The routes of the OpenAI API."""

from quire.server.api.openai.chat import chat_completions
from quire.server.api.openai.completions import completions
from quire.server.api.openai.dialect import OPENAI
from quire.server.api.openai.models import get_model, list_models
from quire.server.api.openai.requests import ChatRequest, CompletionRequest
from quire.server.api.openai.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ModelCard,
    ModelList,
    OpenAIError,
)
from quire.server.http.route import Route

CHAT_EXAMPLE = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'

ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        completions,
        OPENAI,
        body=(CompletionRequest,),
        answer=(Completion,),
        events=(CompletionChunk, OpenAIError),
        example='{"prompt": "Once upon a time", "max_tokens": 32}',
        generates=True,
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        OPENAI,
        body=(ChatRequest,),
        answer=(ChatCompletion,),
        events=(ChatCompletionChunk, OpenAIError),
        example=CHAT_EXAMPLE,
        generates=True,
    ),
    Route("GET", "/v1/models", list_models, OPENAI, answer=(ModelList,), is_open=True),
    Route("GET", "/v1/models/{model}", get_model, OPENAI, answer=(ModelCard,)),
)
