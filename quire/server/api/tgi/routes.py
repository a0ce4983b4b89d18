"""The routes of text-generation-inference's API, with those of Vertex AI and KServe."""

from functools import partial

from quire.server.api.openai import responses as openai
from quire.server.api.openai.requests import ChatRequest, CompletionRequest
from quire.server.api.openai.routes import CHAT_EXAMPLE, PROMPT
from quire.server.api.tgi import generate, kserve, responses, tokenize
from quire.server.api.tgi.dialect import TGI
from quire.server.api.tgi.info import info
from quire.server.api.tgi.requests import GenerateRequest, Parameters, TokenizeRequest
from quire.server.api.tgi.vertex import VertexRequest, vertex
from quire.server.http.route import Route

_EXAMPLE = '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 32}}'
_INFER_EXAMPLE = (
    '{"id": "1", "inputs": [{"name": "in", "shape": [1, 2], "datatype": "BYTES", "data": [72, 105]}], '
    '"outputs": [{"name": "out"}]}'
)
_EVENTS = (responses.GeneratedToken, responses.TGIError)
_OPENAI_EVENTS = (openai.ChatCompletionChunk, openai.CompletionChunk, openai.OpenAIError)
_MODEL = "/v2/models/{model}/versions/{version}"

_get = partial(Route, "GET", dialect=TGI)
_post = partial(Route, "POST", dialect=TGI)
_PARAMETERS = ("parameters", Parameters | None)
_generate = partial(
    _post, body=(GenerateRequest,), open_fields=(_PARAMETERS,), example=_EXAMPLE, generates=True
)  # fmt: skip
VERTEX = _post(
    "/vertex", vertex, body=(VertexRequest,), answer=(responses.Predictions,), generates=True,
    example=f'{{"instances": [{_EXAMPLE}]}}',
)  # fmt: skip
ROUTES = (
    _generate("/", generate.root, answer=(list[responses.Generated],), events=_EVENTS),
    _generate("/generate", generate.generate, answer=(responses.Generated,)),
    _generate("/generate_stream", generate.generate_stream, events=_EVENTS),
    _generate(
        "/invocations", generate.invocations, body=(GenerateRequest, ChatRequest, CompletionRequest),
        answer=(list[responses.Generated], openai.ChatCompletion, openai.Completion),
        events=(*_EVENTS, *_OPENAI_EVENTS), open_fields=(_PARAMETERS, PROMPT),
    ),
    _post(
        "/tokenize", tokenize.tokenize, body=(TokenizeRequest, tokenize.PromptTokenizeRequest),
        answer=(list[responses.TokenSpan], responses.Tokenized), example='{"inputs": "Once upon a time"}',
    ),
    _post(
        "/chat_tokenize", tokenize.chat_tokenize, body=(ChatRequest,), answer=(responses.ChatTokenized,),
        example=CHAT_EXAMPLE,
    ),
    _post(
        "/detokenize", tokenize.detokenize, body=(tokenize.DetokenizeRequest,), answer=(responses.Detokenized,),
        example='{"tokens": [1, 2, 3]}',
    ),
    _get("/tokenizer_info", tokenize.tokenizer_info, answer=(responses.TokenizerInfo,)),
    VERTEX,
    _get("/info", info, answer=(responses.Info,), is_open=True),
    _get("/v2", kserve.server_metadata, answer=(responses.KServeServer,), is_open=True),
    _get("/v2/health/live", kserve.live, answer=(responses.KServeLive,), is_open=True),
    _get("/v2/health/ready", kserve.ready, answer=(responses.KServeLive,), is_open=True),
    _get(_MODEL, kserve.model_metadata, answer=(responses.KServeServer,)),
    _get(f"{_MODEL}/ready", kserve.model_ready, answer=(responses.KServeLive,)),
    _post(
        f"{_MODEL}/infer", kserve.infer, body=(kserve.InferRequest,), answer=(responses.Inferred,), generates=True,
        open_fields=(("inputs", list[kserve.InferInput]), ("outputs", list[kserve.InferOutput]), _PARAMETERS),
        example=_INFER_EXAMPLE,
    ),
)  # fmt: skip
