"""Tools that a model may call, and the format of its calls.

Templates are made for models that were trained on one way of writing, so the template tells which. Where it does not
render tools the model is asked to write as Hermes models do.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from quire.text.thinking import HARMONY

CALL_ID_LENGTH = 24


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # a JSON schema
    strict: bool = False  # a schema that the call format cannot follow is an error
    is_custom: bool = False  # its single argument is a string


class CallStyle(Enum):
    """The way in which a call is written, between the marks of its format."""

    JSON = auto()  # {"name": ..., "arguments": ...}, one or a list
    NAMED = auto()  # name[ARGS]{...}
    SECTIONS = auto()  # a section of calls, with marks around each
    TAGS = auto()  # <function=name><parameter=key>value</parameter></function>
    KEYS = auto()  # name<arg_key>key</arg_key><arg_value>value</arg_value>
    PYTHON = auto()  # [name(key=value)]
    MARKED = auto()  # call:name{key:value}, strings between two of `quote`
    CHANNELS = auto()  # a message to the function; its text are the arguments


@dataclass(frozen=True)
class CallFormat:
    """Calls in an answer: `begin`, one or several calls, `end`."""

    marks: tuple[str, ...]  # the parts of it that may be special tokens; the first begins calls
    begin: str
    end: str
    between: str | None  # two calls; None where there is only one
    style: CallStyle = CallStyle.JSON
    arguments: str = "arguments"  # the key of the arguments, of calls in JSON
    bare: str = ""  # the first character of calls without a mark, which stand at the beginning of an answer
    others: tuple[str, ...] = ()  # marks that begin calls as well, where models are not exact
    last_mark: str = ""  # after the calls that `marks[0]` begins
    quote: str = ""  # around strings
    fenced: bool = False  # the arguments stand in a fence of Markdown, of calls in sections
    id_length: int = CALL_ID_LENGTH  # characters of the id that a call gets

    @property
    def first_marks(self) -> tuple[str, ...]:
        """The marks that begin calls."""
        return (*self.marks[:1], *self.others)

    def opening(self, name: str) -> str:
        """The text before the arguments of a call in JSON."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": '


HERMES = CallFormat(
    ("<tool_call>", "</tool_call>"), "<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n",
    last_mark="</tool_call>",
)  # fmt: skip
MISTRAL = CallFormat(  # its templates insist on nine characters
    ("[TOOL_CALLS]",), "[TOOL_CALLS][", "]", ", ", id_length=9
)
MISTRAL_NAMED = CallFormat(
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), "[TOOL_CALLS]", "", "[TOOL_CALLS]", CallStyle.NAMED, id_length=9
)
LLAMA3 = CallFormat(("<|python_tag|>",), "", "", None, arguments="parameters", bare="{")
PYTHONIC = CallFormat(("<|python_start|>", "<|python_end|>"), "[", "]", ", ", CallStyle.PYTHON, bare="[")
GRANITE = CallFormat(("<|tool_call|>",), "<|tool_call|>[", "]", ", ", others=("<tool_call>",))
PHI4 = CallFormat(
    ("<|tool_call|>", "<|/tool_call|>"), "<|tool_call|>[", "]<|/tool_call|>", ", ", last_mark="<|/tool_call|>"
)
SECTION_BEGIN, PART_BEGIN, SEPARATOR, PART_END, SECTION_END = DEEPSEEK_MARKS = tuple(
    f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")  # DeepSeek's marks use a wide bar, and a block for a space
    for name in ("tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end")
)
DEEPSEEK = CallFormat(
    DEEPSEEK_MARKS, SECTION_BEGIN + PART_BEGIN, PART_END + SECTION_END, PART_END + PART_BEGIN, CallStyle.SECTIONS
)
DEEPSEEK_FENCED = CallFormat(
    DEEPSEEK_MARKS, f"{SECTION_BEGIN}{PART_BEGIN}function{SEPARATOR}", f"\n```{PART_END}{SECTION_END}",
    f"\n```{PART_END}\n{PART_BEGIN}function{SEPARATOR}", CallStyle.SECTIONS, fenced=True,
)  # fmt: skip
QWEN3_CODER = CallFormat(
    ("<tool_call>", "</tool_call>"), "<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n",
    CallStyle.TAGS, others=("<function=",),
)  # fmt: skip
GLM = CallFormat(
    ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "<tool_call>", "</tool_call>", "</tool_call>\n<tool_call>", CallStyle.KEYS,
)  # fmt: skip
FUNCTION_GEMMA = CallFormat(
    ("<start_function_call>", "<end_function_call>", "<escape>"),
    "<start_function_call>", "<end_function_call>", "<end_function_call><start_function_call>",
    CallStyle.MARKED, last_mark="<end_function_call>", quote="<escape>",
)  # fmt: skip
GEMMA4 = CallFormat(
    ("<|tool_call>", "<tool_call|>", '<|"|>'), "<|tool_call>", "<tool_call|>", "<tool_call|><|tool_call>",
    CallStyle.MARKED, last_mark="<tool_call|>", quote='<|"|>',
)  # fmt: skip

HARMONY_CALLS = CallFormat(  # a call ends the answer
    HARMONY.parts, "<|channel|>commentary to=functions.", "", None, CallStyle.CHANNELS
)

# Marks by which a template shows its format, the more particular first. One without any is for Hermes' format.
_SIGNS: tuple[tuple[CallFormat, tuple[str, ...]], ...] = (
    (HARMONY_CALLS, (HARMONY.begin, "<|call|>")),
    (MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (DEEPSEEK_FENCED, (SECTION_BEGIN, "```json")),
    (DEEPSEEK, (SECTION_BEGIN,)),
    (FUNCTION_GEMMA, ("<start_function_call>",)),
    (GEMMA4, ("<|tool_call>call:",)),
    (QWEN3_CODER, ("<function=", "<parameter=")),
    (GLM, ("<arg_key>",)),
    (PHI4, ("<|/tool_call|>",)),
    (PHI4, ("<|tool|>", "<|/tool|>")),
    (GRANITE, ("<|tool_call|>",)),
    (HERMES, ("<tool_call>",)),
    (PYTHONIC, ("func_name1(",)),
    (PYTHONIC, ("<|python_start|>",)),
    (LLAMA3, ("ipython", "tools")),
)


def format_of(template: str) -> CallFormat:
    """The form in which the model of this template writes calls."""
    return next((form for form, signs in _SIGNS if all(sign in template for sign in signs)), HERMES)


def with_system_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with `text` at the end of its system message, which it gets if it has none."""
    rest = [dict(message) for message in messages]
    if rest and rest[0].get("role") in ("system", "developer"):
        text = f"{message_text(rest.pop(0))}\n\n{text}".strip()
    return [{"role": "system", "content": text}, *rest]


def with_system_in_user_message(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with its system message at the beginning of the first message of the user."""
    system, *rest = (dict(message) for message in messages)
    if rest and rest[0].get("role") == "user":
        user = rest.pop(0)
        return [{**user, "content": f"{message_text(system)}\n\n{message_text(user)}"}, *rest]
    return [{**system, "role": "user"}, *rest]


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message: a string, a list of parts, or nothing."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
