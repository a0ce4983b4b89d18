"""One conversation through every API of chats has one answer, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests import web
from tests.server.running import RunningServer
from tests.server.test_reasoning import THINKING_TEMPLATE
from tests.server.test_tools import WEATHER
from tests.server.vocabulary import JSON_PIECES, TOOL_TEMPLATE, served_model

FUNCTION = WEATHER["function"]
CHAT_TOOLS = [WEATHER]
RESPONSE_TOOLS = [{"type": "function", **FUNCTION}]
MESSAGE_TOOLS = [{"name": "weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"],
                  "strict": FUNCTION["strict"]}]  # fmt: skip
ARGUMENTS = '{"city": "rome", "days": 2}'
CHAT_HISTORY = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None,
     "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
]  # fmt: skip
RESPONSE_HISTORY = [
    {"role": "user", "content": "hi"},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ARGUMENTS},
    {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
]
MESSAGE_HISTORY = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": json.loads(ARGUMENTS)}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sun"}]},
]  # fmt: skip
HI = [{"role": "user", "content": "hi"}]
THINKS = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}


@pytest.fixture(scope="module", params=[TOOL_TEMPLATE, THINKING_TEMPLATE], ids=["tools", "thinking"])
def server(request) -> Iterator[RunningServer]:
    model = served_model(2048, end_ids=(0,), pieces=JSON_PIECES, template=request.param)
    running = RunningServer(model=model, max_sequence_tokens=2048, num_pages=6000).start()
    yield running
    running.stop()


def asked(server: RunningServer, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The body of the answer, or its events."""
    answer = web.post(f"{server.url}/v1/{route}", json=body | {"temperature": 0})
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return [answer.json()]
    data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def by_chat(server, history, choice, num_tokens, *, stream):
    tools = {"tools": CHAT_TOOLS, "tool_choice": choice} if choice else {}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"messages": history[0], "max_tokens": num_tokens, "stream": stream, **tools, **usage, **THINKS}
    found = asked(server, "chat/completions", body)
    deltas = [one["delta" if stream else "message"] for part in found for one in part["choices"]]
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for place, call in enumerate(delta.get("tool_calls") or ()):
            whole = calls.setdefault(call.get("index", place), ["", ""])
            whole[0] += call["function"].get("name") or ""
            whole[1] += call["function"].get("arguments") or ""
    text, thinking = ("".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content"))
    usage = found[-1]["usage"]
    return text.strip(), thinking, list(calls.values()), usage["prompt_tokens"], usage["completion_tokens"]


def by_responses(server, history, choice, num_tokens, *, stream):
    tools = {"tools": RESPONSE_TOOLS, "tool_choice": choice} if choice else {}
    body = {"input": history[1], "max_output_tokens": num_tokens, "stream": stream, **tools, **THINKS}
    found = asked(server, "responses", body)
    whole = found[-1]["response"] if stream else found[-1]
    texts = {kind: "".join(part["text"] for item in whole["output"] if item["type"] == kind for part in item["content"])
             for kind in ("message", "reasoning")}  # fmt: skip
    if stream:
        shown = [one["delta"] for one in found if one["type"] == "response.output_text.delta"]
        assert "".join(shown) == texts["message"]
    calls = [[item["name"], item["arguments"]] for item in whole["output"] if item["type"] == "function_call"]
    usage = whole["usage"]
    return texts["message"].strip(), texts["reasoning"], calls, usage["input_tokens"], usage["output_tokens"]


def by_messages(server, history, choice, num_tokens, *, stream):
    choices = {"auto": {"type": "auto"}, "required": {"type": "any"}}
    tools = {"tools": MESSAGE_TOOLS, "tool_choice": choices[choice]} if choice else {}
    body = {"messages": history[2], "max_tokens": num_tokens, "stream": stream, "thinking": {"type": "adaptive"}}
    found = asked(server, "messages", body | tools)
    blocks: list[dict[str, Any]] = [] if stream else found[0]["content"]
    for one in found if stream else ():
        if one["type"] == "content_block_start":
            blocks.append(one["content_block"] | {"input": ""})
        elif one["type"] == "content_block_delta":
            (key,) = one["delta"].keys() - {"type"}
            own = "input" if key == "partial_json" else key
            blocks[one["index"]][own] = blocks[one["index"]].get(own, "") + one["delta"][key]
    text, thinking = ("".join(block.get(key) or "" for block in blocks) for key in ("text", "thinking"))
    calls = [[block["name"], block["input"]] for block in blocks if block["type"] == "tool_use"]
    usage = next(one["usage"] for one in reversed(found) if "usage" in one)
    return (
        text.strip(),
        thinking,
        calls,
        usage["input_tokens"] + usage["cache_read_input_tokens"],
        usage["output_tokens"],
    )


def comparable(answer):
    """Arguments as values, of calls that are complete: a whole Anthropic message has no others."""
    text, thinking, calls, *counts = answer
    values = [[name, json.loads(given) if isinstance(given, str) else given] for name, given in calls]
    return text, thinking, values, counts


@pytest.mark.parametrize("history", [(HI, HI, HI), (CHAT_HISTORY, RESPONSE_HISTORY, MESSAGE_HISTORY)])
@pytest.mark.parametrize(("choice", "num_tokens"), [(None, 7), (None, 60), ("auto", 400), ("required", 500)])
def test_every_api_gives_the_same_answer_and_counts(server, history, choice, num_tokens):
    answers = [
        comparable(ask(server, history, choice, num_tokens, stream=stream))
        for ask in (by_chat, by_responses, by_messages)
        for stream in (False, True)
    ]
    assert answers == [answers[0]] * 6
