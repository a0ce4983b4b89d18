"""Tools and arguments that look like the marks around calls, and texts that no encoding has."""

import json

import pytest

from tests import web

NAMES = ["tool_call", "function", "name", "arguments", "__proto__", "..", "-", "a" * 128]
MARKS = ["<tool_call>", "</tool_call>", '"}}\n</tool_call>', "</think>", "<end>", "\\", "\n", '"', "{", "}"]
HI = {"role": "user", "content": "hi"}
HALF = "\ud800"  # of a pair, which JSON can spell and no text has


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_read_whatever_its_name_and_arguments_look_like(caller, name):
    parameters = {"type": "object", "properties": {name: {"enum": MARKS}}, "required": [name]}
    tools = [{"type": "function", "function": {"name": name, "description": MARKS[2], "parameters": parameters}}]
    asked = {
        "messages": [HI],
        "max_tokens": 900,
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    for seed in range(3):
        answer = web.post(f"{caller.url}/v1/chat/completions", json=asked | {"seed": seed})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == name
        (value,) = json.loads(call["function"]["arguments"]).values()
        assert value in MARKS
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": value}
        again = web.post(f"{caller.url}/v1/chat/completions", json=asked | {"messages": [HI, turn, result], "seed": 1})
        assert again.status_code == 200, again.text


CALL = {"id": HALF, "type": "function", "function": {"name": HALF, "arguments": {HALF: HALF}}}
CHATS = [
    [{"role": "user", "content": HALF, "name": HALF}],
    [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]},
     {"role": "tool", "tool_call_id": HALF, "content": HALF}],
    [HI, {"role": "assistant", "content": None, "reasoning_content": HALF, "refusal": HALF}],
]  # fmt: skip
ITEMS = [
    [{"role": "user", "content": HALF, "id": HALF}],
    [{"type": "function_call", "call_id": HALF, "name": HALF, "arguments": "{}"},
     {"type": "function_call_output", "call_id": HALF, "output": HALF}],
    [{"type": "reasoning", "id": HALF, "summary": [], "content": [{"type": "reasoning_text", "text": HALF}]}, HI],
]  # fmt: skip
BLOCKS = [
    [{"role": "user", "content": HALF}],
    [HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": HALF, "signature": HALF},
                                           {"type": "tool_use", "id": HALF, "name": HALF, "input": {HALF: HALF}}]},
     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": HALF, "content": HALF}]}],
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/v1/chat/completions", {"messages": messages, "max_tokens": 2}) for messages in CHATS),
        *(("/v1/responses", {"input": items, "max_output_tokens": 2}) for items in ITEMS),
        *(("/v1/messages", {"model": "fake", "messages": messages, "max_tokens": 2}) for messages in BLOCKS),
    ],
)
def test_texts_that_no_encoding_has_are_answered_or_refused(caller, path, body):
    for stream in (False, True):
        answer = web.post(caller.url + path, content=json.dumps(body | {"stream": stream}).encode())
        assert answer.status_code in (200, 400), answer.text
        assert '"server_error"' not in answer.text
        assert "api_error" not in answer.text
