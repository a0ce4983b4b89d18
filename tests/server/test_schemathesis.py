"""Requests that nobody would think of, out of the OpenAPI document."""

import copy
import time

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from quire.server.http.routes import openapi_document
from tests import web
from tests.patience import WAIT_S
from tests.server.running import RunningServer
from tests.server.vocabulary import JSON_PIECES, served_model

# Not `positive_data_acceptance`: that a prompt is too long, or a token not in the vocabulary, no schema says.
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
MAX_CPU_S = 5.0  # of this process, client and server, for one request; most take milliseconds
NUM_EXAMPLES = 8  # of each operation: some 300 in all


def operations(described: dict) -> dict:
    found = (result.ok() for result in schemathesis.openapi.from_dict(described).get_all_operations())
    return {operation.label: operation for operation in found}


OPERATIONS = operations(openapi_document())


def try_out(server, operation, mode: GenerationMode, checks, max_examples: int) -> None:
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case) -> None:
        begun_s = time.process_time()
        case.call_and_validate(base_url=server.url, checks=list(checks), timeout=WAIT_S)
        assert time.process_time() - begun_s < MAX_CPU_S

    run()


def test_a_document_that_is_wrong_is_found_out(server):
    wrong = copy.deepcopy(openapi_document())
    del wrong["paths"]["/generate"]["post"]["responses"]["422"]
    with pytest.raises(FailureGroup, match="Undocumented status code"):
        try_out(server, operations(wrong)["POST /generate"], GenerationMode.NEGATIVE, CHECKS, 30)


SAID = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ASKED = {"input": "hi", "max_output_tokens": 4}
EVERYTHING = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "timings": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
PARAMETERS = {"max_new_tokens": 4, "details": True, "decoder_input_details": True, "top_n_tokens": 2, "best_of": 2}
# Bodies, and schemas of which something is in their answers.
EXAMPLES = [
    ("POST /v1/chat/completions", SAID, ["ChatCompletion", "ChatChoice", "Message", "Usage"]),
    ("POST /v1/chat/completions", SAID | {"logprobs": True, "top_logprobs": 2}, ["ChatLogprob", "ScoredToken"]),
    ("POST /v1/chat/completions", SAID | EVERYTHING, ["ChatCompletionChunk", "ChatChunkChoice", "Usage", "Timings"]),
    ("POST /v1/chat/completions", SAID | {"max_tokens": 0}, ["OpenAIError", "ErrorDetails"]),
    ("POST /v1/responses", ASKED, ["Response", "ResponseUsage", "ResponseText", "IncompleteDetails"]),
    ("POST /v1/responses", ASKED | {"stream": True, "timings": True},
     ["LifecycleEvent", "ItemEvent", "PartEvent", "TextDeltaEvent", "TextDoneEvent", "Timings"]),
    ("POST /v1/responses", ASKED | {"stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 1},
     ["ChatLogprob", "ScoredToken"]),
    ("POST /v1/responses", ASKED | {"store": 5}, ["OpenAIError", "ErrorDetails"]),
    ("POST /v1/responses/input_tokens", ASKED, ["InputTokens"]),
    ("POST /v1/messages", SAID, ["AnthropicMessage", "MessageUsage", "TextBlock"]),
    ("POST /v1/messages", SAID | {"stream": True, "timings": True},
     ["MessageStart", "BlockStart", "BlockDelta", "BlockStop", "MessageDelta", "MessageStop", "Ping", "TextDelta"]),
    ("POST /v1/messages", SAID | {"system": 5}, ["AnthropicError", "ErrorMessage"]),
    ("POST /v1/messages/count_tokens", {"messages": SAID["messages"]}, ["TokenCount"]),
    ("POST /v1/completions", {"prompt": "ab", "logprobs": 2, "echo": True}, ["Completion", "CompletionLogprobs"]),
    ("POST /v1/completions", {"prompt": [[1, 2], [3]]} | EVERYTHING, ["CompletionChunk", "CompletionChoice"]),
    ("POST /generate", {"inputs": "ab", "parameters": PARAMETERS | {"do_sample": True}},
     ["Generated", "Details", "BestOfSequence", "Token", "PrefillToken"]),
    ("POST /generate", {"inputs": ""}, ["TGIError"]),
    ("POST /generate_stream", {"inputs": "ab", "timings": True}, ["GeneratedToken", "StreamDetails", "Timings"]),
    ("POST /", {"inputs": "ab"}, ["Generated"]),
    ("POST /", {"inputs": "ab", "stream": True}, ["GeneratedToken"]),
    ("POST /invocations", SAID, ["ChatCompletion"]),
    ("POST /invocations", {"prompt": "ab", "stream": True}, ["CompletionChunk"]),
    ("POST /tokenize", {"inputs": "ab"}, ["TokenSpan"]),
    ("POST /tokenize", {"prompt": "ab"}, ["Tokenized"]),
    ("POST /chat_tokenize", SAID, ["ChatTokenized"]),
    ("POST /detokenize", {"tokens": [1, 2]}, ["Detokenized"]),
    ("POST /vertex", {"instances": [{"inputs": "ab", "parameters": {"max_new_tokens": 4}}]}, ["Predictions"]),
    ("GET /info", None, ["Info"]),
    ("GET /v1/models", None, ["ModelList", "ModelCard"]),
    ("GET /health/generate", None, ["Generates"]),
    ("GET /server_info", None, ["ServerInfo"]),
    ("GET /model_info", None, ["ModelInfo"]),
    ("GET /v2", None, ["KServeServer"]),
    ("GET /v2/health/ready", None, ["KServeLive"]),
]  # fmt: skip


@pytest.mark.parametrize(("label", "body", "schemas"), EXAMPLES)
def test_answers_are_as_the_document_says_and_one_that_lacks_a_field_is_found_out(server, label, body, schemas):
    method, path = label.split()
    check_answer(label, web.request(method, server.url + path, json=body), schemas)


def test_calls_of_tools_are_as_the_document_says():
    model = served_model(
        2048, end_ids=(0,), pieces=JSON_PIECES, template="<tool_call>{{ messages[0].content }}{{ tools }}"
    )
    server = RunningServer(model=model, max_sequence_tokens=2048, num_pages=6000).start()
    try:
        url, label = f"{server.url}/v1/chat/completions", "POST /v1/chat/completions"
        asked = SAID | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 1000, "seed": 1}
        check_answer(label, web.post(url, json=asked), ["ToolCall", "FunctionCall"])
        check_answer(label, web.post(url, json=asked | {"stream": True}), ["ToolCallPart", "FunctionCallPart"])
    finally:
        server.stop()


def check_answer(label: str, answer: httpx.Response, schemas: list[str]) -> None:
    """It is as the document says, and would not be if any of `schemas` had one field more."""
    OPERATIONS[label].validate_response(answer)
    for schema in schemas:
        wrong = copy.deepcopy(openapi_document())
        wrong["components"]["schemas"][schema]["required"].append("promised")  # and never sent
        operation = operations(wrong)[label]
        with pytest.raises((Failure, FailureGroup)):
            operation.validate_response(answer)


def test_every_answer_with_a_body_has_a_schema():
    for path, methods in openapi_document()["paths"].items():
        for method, operation in methods.items():
            for status, response in operation["responses"].items():
                for media_type, content in response.get("content", {}).items():
                    assert content["schema"], (path, method, status, media_type)


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_every_answer_is_one_that_the_document_knows(server, label):
    try_out(server, OPERATIONS[label], GenerationMode.POSITIVE, CHECKS, NUM_EXAMPLES)


@pytest.mark.parametrize("label", sorted(label for label, operation in OPERATIONS.items() if operation.body))
def test_what_the_document_does_not_allow_is_refused(server, label):
    try_out(server, OPERATIONS[label], GenerationMode.NEGATIVE, (*CHECKS, negative_data_rejection), NUM_EXAMPLES)
