"""Conversations that templates are rendered with."""

from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a town, e.g. \"Zürich\" or '東京' <now>",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "unit": {"type": "string", "enum": ["°C", "°F"]}},
            "required": ["town"],
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "description": "What time it is", "parameters": {"type": "object", "properties": {}}},
}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any, call_id: str = "call00001") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLED = said("assistant", "", tool_calls=[call("get_weather", {"town": "東京", "days": [1, 2.5, None, True]})])

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [said("user", "What is the capital of France?")]},
    "system": {"messages": [said("system", "Be brief."), said("user", "Hi")]},
    "several turns": {
        "messages": [
            said("system", " Talk like a pirate.\n"),
            said("user", "Hello"),
            said("assistant", "Arr."),
            said("user", "  Who are you?\n"),
        ]
    },
    "no system, several turns": {
        "messages": [said("user", "1+1?"), said("assistant", "2"), said("user", "2+2?"), said("assistant", "4")]
    },
    "unicode": {"messages": [said("user", "Grüße 😀 你好 <b>&amp;</b> \"quoted\" 'single' {{ braces }} {% raw %}")]},
    "empty": {"messages": [said("user", "")]},
    "tools": {"messages": [said("user", "Weather in Tokyo?")], "tools": [WEATHER, CLOCK]},
    "tool answered": {
        "messages": [said("user", "Weather?"), CALLED, said("tool", '{"sky": "clear ☀"}', tool_call_id="call00001")],
        "tools": [WEATHER],
    },
    "documents": {
        "messages": [said("user", "Summarise.")],
        "documents": [{"title": "b", "text": "two\nlines"}, {"title": "a", "text": "ä"}],
    },
    "thinking": {
        "messages": [
            said("user", "6*7?"),
            said("assistant", "<think>\nsix sevens\n</think>\n\n42"),
            said("user", "8*7?"),
            said("assistant", "56", reasoning_content="\neight sevens\n"),
        ]
    },
    "system later": {"messages": [said("user", "a"), said("system", "b"), said("user", "STOP"), said("user", "c")]},
    "parts": {
        "messages": [
            said("user", [{"type": "text", "text": " What is "}, {"type": "text", "text": "this? "}]),
        ]
    },
}
