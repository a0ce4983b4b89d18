"""Fields of messages that have another type than their API gives them are refused by its name for them."""

import json

import pytest

from tests import web
from tests.server.vocabulary import JSON_PIECES, TEMPLATE, served_model

ASKED = {"role": "user", "content": "a"}
FUNCTION = {"name": "weather", "arguments": "{}"}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}
CUSTOM = {"id": "call_1", "type": "custom", "custom": {"name": "run", "input": "ls"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "b"}


def called(call: object) -> dict[str, object]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def without(given: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in given.items() if name != key}


WRONG = [5, 1.5, True, [], ["a"], {}, {"a": "b"}]
TEXTS = ["name", "tool_call_id", "refusal", "reasoning_content", "reasoning", "thinking"]
REFUSED = {
    **{f"{key} {wrong!r}": (ASKED | {key: wrong}, key) for key in TEXTS for wrong in WRONG},
    **{f"call {wrong!r}": (called(wrong), "tool_calls[0]") for wrong in ("a", None, *WRONG)},
    **{f"{key} of a call {wrong!r}": (called(CALL | {key: wrong}), f"tool_calls[0].{key}")
       for key in ("id", "type") for wrong in WRONG},
    **{f"function {wrong!r}": (called(CALL | {"function": wrong}), "tool_calls[0]") for wrong in (5, None, [], "a")},
    **{f"name of a function {wrong!r}": (called(CALL | {"function": FUNCTION | {"name": wrong}}),
                                         "tool_calls[0].function.name") for wrong in (None, *WRONG)},
    **{f"arguments {wrong!r}": (called(CALL | {"function": FUNCTION | {"arguments": wrong}}),
                                "tool_calls[0].function.arguments") for wrong in (5, 1.5, True, [], ["a"])},
    "no name of a function": (called(CALL | {"function": {"arguments": "{}"}}), "tool_calls[0].function.name"),
    "input": (called(CUSTOM | {"custom": {"name": "run", "input": 5}}), "tool_calls[0].custom.input"),
    "name of a custom tool": (called(CUSTOM | {"custom": {"input": "ls"}}), "tool_calls[0].custom.name"),
    "bare name": (called({"name": 5, "arguments": {}}), "tool_calls[0].name"),
    "bare arguments": (called({"name": "weather", "arguments": 5}), "tool_calls[0].arguments"),
    "bare arguments that are no JSON": (called({"name": "weather", "arguments": "{"}), "tool_calls[0].arguments"),
    "refusal in a part": (ASKED | {"content": [{"type": "refusal", "refusal": 5}]}, "content[0].refusal"),
    "a part that is a word": (ASKED | {"content": ["text"]}, "content[0].type"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tool_template() -> str:
    calls = "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    return TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] }}" + calls + "{% endfor %}")


@pytest.mark.parametrize(("message", "field"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_type_is_refused_by_name(server, message, field):
    body = {"messages": [ASKED, message]}
    answer = web.post(f"{server.url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"messages[1].{field}"), answer.text
    for path in ("/invocations", "/chat_tokenize", "/tokenize"):
        answer = web.post(server.url + path, json=body)
        assert answer.status_code == 422, (path, answer.text)
        assert f"messages[1].{field}" in answer.text


@pytest.mark.parametrize(
    "turns",
    [
        [ASKED | dict.fromkeys([*TEXTS, "tool_calls"])],
        [called(CALL | {"function": FUNCTION | {"arguments": one}}) for one in ("", "{}", {}, {"a": 1}, None)],
        [called(without(CALL, key)) for key in ("id", "type")],
        [called(CALL | {"id": None, "type": None, "index": 0}), RESULT | {"name": "weather"}],
        [called(CALL | {"function": {"name": "weather"}}), RESULT],
        [called(CALL | {"function": FUNCTION | {"description": None, "parsed_arguments": None}})],
        [called(CUSTOM), RESULT | {"tool_call_id": None}],
        [called({"name": "weather", "arguments": {}}), without(RESULT, "tool_call_id")],
        [{"role": "assistant", "content": "a", "tool_calls": []}],
    ],
)  # fmt: skip
def test_fields_that_are_missing_or_null_and_arguments_as_objects_are_taken(server, turns):
    body = {"messages": [ASKED, *turns], "max_tokens": 1}
    answer = web.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "call",
    [CALL, {"function": {"name": "weather"}}, {"name": "weather"}, {"name": "weather", "arguments": ""},
     {"function": {"name": "weather", "arguments": None}}, {"name": "weather", "arguments": {}}],
)  # fmt: skip
def test_calls_without_arguments_are_the_same_in_every_form(make_server, tool_template, call):
    for template, expected in ((tool_template, "weather{}"), (TEMPLATE, '{"name": "weather", "arguments": {}}')):
        server = make_server(model=served_model(template=template))
        answer = web.post(f"{server.url}/chat_tokenize", json={"messages": [ASKED, called(call), RESULT]})
        assert answer.status_code == 200, answer.text
        assert expected in answer.json()["templated_text"]


def test_arguments_that_are_no_json_are_named_by_the_item_that_has_them(make_server, tool_template):
    server = make_server(model=served_model(template=tool_template, pieces=JSON_PIECES))
    calls = [{"type": "function_call", "call_id": f"c{n}", "name": "weather", "arguments": "{}"} for n in range(3)]
    calls[2]["arguments"] = "[]"
    outputs = [{"type": "function_call_output", "call_id": f"c{n}", "output": "a"} for n in range(3)]
    answer = web.post(f"{server.url}/v1/responses", json={"input": [ASKED, *calls, *outputs]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[3].arguments"), answer.text


ITEMS = {
    "call_id": {"type": "function_call", "name": "a", "arguments": "{}"},
    "name": {"type": "function_call", "call_id": "c", "arguments": "{}"},
    "arguments": {"type": "function_call", "call_id": "c", "name": "a"},
    "input": {"type": "custom_tool_call", "call_id": "c", "name": "a"},
    "id": {"type": "reasoning", "summary": []},
    "output": {"type": "function_call_output", "call_id": "c"},
}


@pytest.mark.parametrize("wrong", [5, True, {"a": 1}])
@pytest.mark.parametrize("key", ITEMS)
def test_a_wrong_type_in_an_item_is_refused_by_name(server, key, wrong):
    answer = web.post(f"{server.url}/v1/responses", json={"input": [ASKED, ITEMS[key] | {key: wrong}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"input[1].{key}"), answer.text


BLOCKS = {
    "id": {"type": "tool_use", "name": "a", "input": {}},
    "name": {"type": "tool_use", "id": "c", "input": {}},
    "input": {"type": "tool_use", "id": "c", "name": "a"},
    "thinking": {"type": "thinking", "signature": "s"},
    "text": {"type": "text"},
}


@pytest.mark.parametrize("wrong", [5, True, ["a"], None])
@pytest.mark.parametrize("key", BLOCKS)
def test_a_wrong_type_in_a_block_is_refused_by_name(server, key, wrong):
    block = BLOCKS[key] | {key: wrong}
    body = {"model": "fake", "max_tokens": 1, "messages": [ASKED, {"role": "assistant", "content": [block]}, ASKED]}
    answer = web.post(f"{server.url}/v1/messages", json=body)
    assert answer.status_code == 400, answer.text
    assert f"messages[1].content[0].{key}" in json.loads(answer.text)["error"]["message"]
