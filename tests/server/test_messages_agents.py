"""Requests as coding agents send them to the Anthropic API."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests import web
from tests.server.running import RunningServer
from tests.server.test_messages import GREEDY, events_of
from tests.server.vocabulary import JSON_PIECES, TOOL_TEMPLATE, served_model

EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "authorization": "Bearer none",
    "user-agent": "claude-cli/2.1.0 (external, cli)",
    "x-app": "cli",
}


def tool(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "name": name,
        "description": f"does {name}",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        },
        "eager_input_streaming": True,
    }


TEXT = {"type": "string", "description": "a text"}
FLAG = {"default": False, "type": "boolean"}
TODO = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "minLength": 1},
        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
    },
    "required": ["content", "status"],
    "additionalProperties": False,
}
TOOLS = [
    tool("bash", ["command"], command=TEXT, timeout={"type": "number"}, run_in_background=FLAG),
    tool("read", ["file_path"], file_path=TEXT, offset={"type": "integer", "minimum": 0, "maximum": 9007199254740991}),
    tool("edit", ["file_path", "old", "new"], file_path=TEXT, old=TEXT, new=TEXT, replace_all=FLAG),
    tool("todo_write", ["todos"], todos={"type": "array", "items": TODO}),
    tool("web_fetch", ["url", "prompt"], url={"type": "string", "format": "uri"}, prompt=TEXT),
    tool("exit_plan_mode", [], **{}),
    *(tool(f"mcp__server__tool_{'abcde'[n]}", ["query"], query=TEXT) for n in range(5)),
    tool("now", [], **{}) | {"cache_control": EPHEMERAL},
]  # fmt: skip
REMINDER = {"type": "text", "text": "<system-reminder>\nthe todo list is empty\n</system-reminder>\n"}
ASKED: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli;"},
        {"type": "text", "text": "you are a coding agent.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "be concise. " * 9, "cache_control": EPHEMERAL | {"scope": "global"}},
    ],
    "tools": TOOLS,
    "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "s" * 36})},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "messages": [
        {"role": "user", "content": [REMINDER, {"type": "text", "text": "the time?", "cache_control": EPHEMERAL}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "now tells it", "signature": "c2ln"},
                {"type": "text", "text": "let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "toolu_2", "name": "read", "input": {"file_path": "/etc/clock"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"tool_use_id": "toolu_1", "type": "tool_result", "content": [{"type": "text", "text": "noon"}]},
                {"tool_use_id": "toolu_2", "type": "tool_result", "content": "no such file", "is_error": True},
                REMINDER | {"cache_control": EPHEMERAL},
            ],
        },
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def agents() -> Iterator[RunningServer]:
    model = served_model(16384, end_ids=(0,), pieces=JSON_PIECES, template=TOOL_TEMPLATE)
    sizes = {
        "max_sequence_tokens": 16384,
        "num_pages": 9000,
        "max_step_tokens": 16384,
        "max_batch_prefill_tokens": 16384,
    }
    running = RunningServer(model=model, **sizes).start()
    yield running
    running.stop()


def test_a_turn_of_a_coding_agent_is_answered(agents):
    body = ASKED | {"tool_choice": {"type": "tool", "name": "now"}}
    answer = web.post(f"{agents.url}/v1/messages?beta=true", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    assert "x-quire-ignored-fields" not in answer.headers
    events = events_of(answer.text)
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [(block["type"], block["name"]) for block in started] == [("tool_use", "now")]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["context_management"] == {"applied_edits": []}
    again = web.post(f"{agents.url}/v1/messages?beta=true", json=body, headers=HEADERS)
    usage = events_of(again.text)[0]["message"]["usage"]
    assert usage["cache_read_input_tokens"] > 9 * usage["input_tokens"]


def test_the_tokens_of_a_turn_are_counted(agents):
    prompt = {name: ASKED[name] for name in ("model", "system", "tools", "messages", "thinking")}
    counted = web.post(f"{agents.url}/v1/messages/count_tokens?beta=true", json=prompt, headers=HEADERS)
    assert counted.status_code == 200, counted.text
    body = ASKED | {"stream": False, "max_tokens": 1}
    usage = web.post(f"{agents.url}/v1/messages?beta=true", json=body, headers=HEADERS).json()["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_the_small_requests_beside_the_turns_are_answered(agents):
    quota = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}], "metadata": {}}
    assert web.post(f"{agents.url}/v1/messages?beta=true", json=quota, headers=HEADERS).status_code == 200
    schema = {"type": "object", "properties": {"title": {"enum": ["a", "b"]}}, "required": ["title"]}
    title = {
        "model": "fake", "max_tokens": 32000, "stream": True, "tools": [], "system": ASKED["system"][:2], **GREEDY,
        "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "write a title"}]}],
    }  # fmt: skip
    answer = web.post(f"{agents.url}/v1/messages?beta=true", json=title, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    deltas = [event["delta"] for event in events_of(answer.text) if event["type"] == "content_block_delta"]
    assert json.loads("".join(delta["text"] for delta in deltas))["title"] in ("a", "b")
    assert web.head(f"{agents.url}/").status_code == 200
