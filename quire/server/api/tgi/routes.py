"""The routes of text-generation-inference's API, with those of Vertex AI and KServe."""

from functools import partial

from quire.server.api.openai.requests import ChatRequest, CompletionRequest
from quire.server.api.openai.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    OpenAIError,
)
from quire.server.api.openai.routes import CHAT_EXAMPLE
from quire.server.api.tgi import generate, kserve, tokenize
from quire.server.api.tgi.dialect import TGI
from quire.server.api.tgi.info import info
from quire.server.api.tgi.requests import GenerateRequest, TokenizeRequest
from quire.server.api.tgi.responses import (
    ChatTokenized,
    Detokenized,
    Generated,
    GeneratedToken,
    Inferred,
    Info,
    KServeLive,
    KServeServer,
    Predictions,
    TGIError,
    Tokenized,
    TokenSpan,
)
from quire.server.api.tgi.vertex import VertexRequest, vertex
from quire.server.http.route import Route

_GENERATE = '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 32}}'
_INFER = (
    '{"id": "1", "inputs": [{"name": "in", "shape": [1, 2], "datatype": "BYTES", "data": [72, 105]}], '
    '"outputs": [{"name": "out"}]}'
)
_EVENTS = (GeneratedToken, TGIError)

_generate = partial(Route, "POST", dialect=TGI, body=(GenerateRequest,), example=_GENERATE, generates=True)
_get = partial(Route, "GET", dialect=TGI)
_MODEL = "/v2/models/{model}/versions/{version}"
VERTEX = Route(
    "POST",
    "/vertex",
    vertex,
    TGI,
    body=(VertexRequest,),
    answer=(Predictions,),
    example=f'{{"instances": [{_GENERATE}]}}',
    generates=True,
)
ROUTES = (
    _generate("/", generate.root, answer=(list[Generated],), events=_EVENTS),
    _generate("/generate", generate.generate, answer=(Generated,)),
    _generate("/generate_stream", generate.generate_stream, events=_EVENTS),
    _generate(
        "/invocations",
        generate.invocations,
        body=(GenerateRequest, ChatRequest, CompletionRequest),
        answer=(list[Generated], ChatCompletion, Completion),
        events=(*_EVENTS, ChatCompletionChunk, CompletionChunk, OpenAIError),
    ),
    Route(
        "POST",
        "/tokenize",
        tokenize.tokenize,
        TGI,
        body=(TokenizeRequest, tokenize.PromptTokenizeRequest),
        answer=(list[TokenSpan], Tokenized),
        example='{"inputs": "Once upon a time"}',
    ),
    Route(
        "POST",
        "/chat_tokenize",
        tokenize.chat_tokenize,
        TGI,
        body=(ChatRequest,),
        answer=(ChatTokenized,),
        example=CHAT_EXAMPLE,
    ),
    Route(
        "POST",
        "/detokenize",
        tokenize.detokenize,
        TGI,
        body=(tokenize.DetokenizeRequest,),
        answer=(Detokenized,),
        example='{"tokens": [1, 2, 3]}',
    ),
    VERTEX,
    _get("/info", info, answer=(Info,), is_open=True),
    _get("/v2", kserve.server_metadata, answer=(KServeServer,), is_open=True),
    _get("/v2/health/live", kserve.live, answer=(KServeLive,), is_open=True),
    _get("/v2/health/ready", kserve.ready, answer=(KServeLive,), is_open=True),
    _get(_MODEL, kserve.model_metadata, answer=(KServeServer,)),
    _get(f"{_MODEL}/ready", kserve.model_ready, answer=(KServeLive,)),
    Route(
        "POST",
        f"{_MODEL}/infer",
        kserve.infer,
        TGI,
        body=(kserve.InferRequest,),
        answer=(Inferred,),
        example=_INFER,
        generates=True,
    ),
)
