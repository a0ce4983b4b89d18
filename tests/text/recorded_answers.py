"""Answers with calls, as models of each family write them."""

from typing import NamedTuple

from quire.text.tools import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    FUNCTION_GEMMA,
    GEMMA4,
    GLM,
    GRANITE,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    PART_BEGIN,
    PART_END,
    PHI4,
    PYTHONIC,
    QWEN3_CODER,
    SECTION_BEGIN,
    SECTION_END,
    SEPARATOR,
    CallFormat,
)

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": ["object", "null"]}},
    },
    "now": {"type": "object", "properties": {}},
    "note": {"type": "object", "properties": {"text": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "tags": {}}},
}


class Recorded(NamedTuple):
    form: CallFormat
    answer: str
    text: str
    calls: list[tuple[str, dict[str, object]]]


ROME = ("weather", {"city": "Rome", "days": 3})
OSLO = ("weather", {"city": "Oslo", "days": 1})
NOW = ("now", {})

ANSWERS = {
    "hermes": Recorded(
        HERMES,
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
        "I look.\n", [ROME],
    ),
    "hermes in parallel": Recorded(
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        "", [ROME, NOW],
    ),
    "qwen without blanks, arguments first": Recorded(
        HERMES,
        '<tool_call>{"arguments":{"city":"Rome","days":3},"name":"weather"}</tool_call><tool_call>{"name":"now"}',
        "", [ROME, NOW],
    ),
    "hermes with arguments in a string": Recorded(
        HERMES,
        '<tool_call>\n{"id": 7, "type": "function", "function": {"name": "weather", "arguments": '
        '"{\\"city\\": \\"Rome\\", \\"days\\": 3}"}}\n</tool_call>',
        "", [ROME],
    ),
    "hermes with marks and lines in a string": Recorded(
        HERMES,
        '<tool_call>\n{"name": "note", "arguments": {"text": "</tool_call>}\n\\d \\u00e9"}}\n</tool_call>',
        "", [("note", {"text": "</tool_call>}\n\\d é"})],
    ),
    "qwen3-coder": Recorded(
        QWEN3_CODER,
        "Let me see.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=note>\n<parameter=text>\na < b\n\n</p>\n"
        "</parameter>\n<parameter=tags>\n[\"x\"]\n</parameter>\n</function>\n</tool_call>",
        "Let me see.\n\n", [ROME, ("note", {"text": "a < b\n\n</p>", "tags": ["x"]})],
    ),
    "qwen3-coder without the first mark": Recorded(
        QWEN3_CODER,
        "<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        "", [ROME],
    ),
    "llama 3.1": Recorded(
        LLAMA3, '{"name": "weather", "parameters": {"city": "Rome", "days": 3}}', "", [ROME],
    ),
    "llama 3.1 with its tag, several": Recorded(
        LLAMA3,
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Rome", "days": 3}}; '
        '{"name": "now", "parameters": {}}',
        "", [ROME, NOW],
    ),
    "llama 3.1, JSON that is no call": Recorded(
        LLAMA3, '{"name": "Rome", "parameters": {"a": 1}}', '{"name": "Rome", "parameters": {"a": 1}}', [],
    ),
    "llama 3.2 pythonic": Recorded(
        PYTHONIC, "[weather(city='Rome', days=3), now()]", "", [ROME, NOW],
    ),
    "llama 4 pythonic": Recorded(
        PYTHONIC,
        '<|python_start|>[note(text="it\\\'s \\"so\\"", tags=[1, -2.5, True, None, {"a": \'b\'}])]<|python_end|>',
        "", [("note", {"text": "it's \"so\"", "tags": [1, -2.5, True, None, {"a": "b"}]})],
    ),
    "pythonic, a list that is no call": Recorded(PYTHONIC, "[1, 2] and [now()]", "[1, 2] and [now()]", []),
    "mistral": Recorded(
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "days": 3}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        "", [ROME, NOW],
    ),
    "mistral v11": Recorded(
        MISTRAL_NAMED,
        'Sure.[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 3}[TOOL_CALLS]now[ARGS]{}',
        "Sure.", [ROME, NOW],
    ),
    "mistral v11 with ids, and without its second mark": Recorded(
        MISTRAL_NAMED, "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]now{}", "", [NOW, NOW],
    ),
    "granite 3": Recorded(
        GRANITE,
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome", "days": 3}}, '
        '{"name": "now", "arguments": {}}]',
        "", [ROME, NOW],
    ),
    "granite 3 as text": Recorded(
        GRANITE, '<tool_call>[{"name": "now", "arguments": {}}]', "", [NOW],
    ),
    "phi 4": Recorded(
        PHI4,
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome", "days": 3}}]<|/tool_call|>',
        "", [ROME],
    ),
    "deepseek r1": Recorded(
        DEEPSEEK_FENCED,
        f'Hm.{SECTION_BEGIN}{PART_BEGIN}function{SEPARATOR}weather\n```json\n{{"city": "Rome", "days": 3}}\n```'
        f"{PART_END}\n{PART_BEGIN}function{SEPARATOR}now\n```json\n{{}}\n```{PART_END}{SECTION_END}",
        "Hm.", [ROME, NOW],
    ),
    "deepseek v3.1": Recorded(
        DEEPSEEK,
        f'{SECTION_BEGIN}{PART_BEGIN}weather{SEPARATOR}{{"city": "Rome", "days": 3}}{PART_END}'
        f"{PART_BEGIN}now{SEPARATOR}{{}}{PART_END}{SECTION_END}",
        "", [ROME, NOW],
    ),
    "glm 4.5": Recorded(
        GLM,
        "I ask.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "I ask.\n", [ROME, NOW],
    ),
    "glm 4.7": Recorded(
        GLM,
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
        "<arg_value>1</arg_value></tool_call>",
        "", [OSLO],
    ),
    "functiongemma": Recorded(
        FUNCTION_GEMMA,
        "<start_function_call>call:weather{city:<escape>Rome<escape>,days:3}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        "", [ROME, NOW],
    ),
    "gemma 4": Recorded(
        GEMMA4,
        'So.<|tool_call>call:note{text:<|"|>a, {b}: "c"<|"|>,tags:[1,true,{x:<|"|>y<|"|>}]}<tool_call|>',
        "So.", [("note", {"text": 'a, {b}: "c"', "tags": [1, True, {"x": "y"}]})],
    ),
}  # fmt: skip
