"""The ways in which models write calls, one reader each. A reader begins after the first mark of its form."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quire.text.alternatives import alternatives, kind_of, types_of
from quire.text.call_scanner import JsonScanner, Malformed, MarkedScanner, PythonScanner, Reads, Scanner, ValueScanner
from quire.text.tools import PART_BEGIN, PART_END, SECTION_END, SEPARATOR, CallFormat, CallStyle

_CALL_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type", "index")


class CallSink(Protocol):
    """Takes the calls that a reader finds. The arguments of a call are what its scanner writes."""

    def start(self) -> None:
        """A call begins here; the text before was marks between calls."""

    def check(self, name: str) -> None:
        """Raises Malformed where no call can have this name."""

    def begin(self, name: str) -> None:
        """The arguments of this call follow, or have been written before."""

    def complete(self) -> None:
        """All arguments are written."""

    def schema(self, name: str) -> Mapping[str, Any]:
        """The schema of a function's parameters."""


def reader_of(form: CallFormat, sink: CallSink, mark: str) -> tuple[Scanner, Reads[None]]:
    """A scanner, and a reader that uses it."""
    if form.style is CallStyle.PYTHON:
        python = PythonScanner()
        return python, _python_calls(python, sink)
    if form.style is CallStyle.MARKED:
        marked = MarkedScanner(form.quote)
        return marked, _marked_call(marked, sink, form)
    scan = JsonScanner()
    if form.style is CallStyle.TAGS:
        return scan, _tagged_call(scan, sink, mark)
    if form.style is CallStyle.KEYS:
        return scan, _keyed_call(scan, sink)
    if form.style is CallStyle.SECTIONS:
        return scan, _section(scan, sink)
    if form.style is CallStyle.NAMED:
        return scan, _named_calls(scan, sink)
    return scan, _json_calls(scan, sink, form.last_mark)


def _json_calls(scan: JsonScanner, sink: CallSink, last_mark: str) -> Reads[None]:
    """An object, or a list of them."""
    char = yield from scan.blank()
    is_list = char == "["
    if is_list:
        char = yield from scan.blank()
    while True:
        if char != "{":
            raise Malformed
        yield from _json_call(scan, sink)
        sink.complete()
        if not is_list:
            break
        char = yield from scan.blank()
        if char == "]":
            break
        if char != ",":
            raise Malformed
        sink.start()
        char = yield from scan.blank()
    if last_mark:
        yield from scan.literal_after_blanks(last_mark)


def _json_call(scan: JsonScanner, sink: CallSink, *, is_inner: bool = False) -> Reads[None]:
    """The rest of {"name": ..., "arguments": ...}, in either order, or of {"function": {...}} with that inside."""
    name, has_arguments, is_begun = "", False, False
    char = ","
    while char == ",":
        key = yield from scan.text()
        yield from scan.literal_after_blanks(":")
        if key == "name":
            name = yield from scan.text()
            sink.check(name)
        elif key in _CALL_KEYS and not has_arguments:
            has_arguments = True
            if name:
                is_begun = True
                sink.begin(name)
            yield from _arguments(scan)
        elif key == "function" and not name and not is_inner:
            yield from scan.literal_after_blanks("{")
            yield from _json_call(scan, sink, is_inner=True)
            is_begun = True
        elif key in _OTHER_KEYS:
            yield from scan.aside(scan.value())
        else:
            raise Malformed
        char = yield from scan.blank()
    if char != "}" or not (name or is_begun):
        raise Malformed
    if not is_begun:
        sink.begin(name)
        if not has_arguments:
            scan.out.append("{}")


def _arguments(scan: JsonScanner) -> Reads[None]:
    """An object, the text of one, or null, which stands for none."""
    char = yield from scan.blank()
    if char == "{":
        yield from scan.members(0)
    elif char == '"':
        scan.back(char)
        text = yield from scan.text()
        if not isinstance(_parsed(text), dict):
            raise Malformed
        scan.out.append(text)
    else:
        scan.back(char)
        yield from scan.literal("null")
        scan.out.append("{}")


def _object(scan: ValueScanner) -> Reads[None]:
    if (yield from scan.blank()) != "{":
        raise Malformed
    yield from scan.members(0)


def _named_calls(scan: JsonScanner, sink: CallSink) -> Reads[None]:
    """Mistral's: a name, [ARGS] and an object; before its eleventh version a list of objects."""
    char = yield from scan.blank()
    scan.back(char)
    if char and char in "[{":
        yield from _json_calls(scan, sink, "")
        return
    name = yield from scan.name()
    char = yield from scan.blank()
    if char == "[":
        mark = yield from scan.word_until("]")
        if mark == "CALL_ID":
            yield from scan.until("[ARGS]")
        elif mark != "ARGS":
            raise Malformed
    else:
        scan.back(char)
    sink.begin(name)
    yield from _object(scan)
    sink.complete()


def _section(scan: JsonScanner, sink: CallSink) -> Reads[None]:
    """DeepSeek's: a section of calls, each a name and an object; in older models with a type before and in a fence."""
    yield from scan.literal_after_blanks(PART_BEGIN)
    while True:
        name = yield from scan.name()
        yield from scan.literal(SEPARATOR)
        char = yield from scan.blank()
        scan.back(char)
        is_fenced = char != "{"
        if is_fenced:
            name = yield from scan.name()
            yield from scan.literal_after_blanks("```json")
        sink.begin(name)
        yield from _object(scan)
        sink.complete()
        if is_fenced:
            yield from scan.literal_after_blanks("```")
        yield from scan.literal_after_blanks(PART_END)
        scan.back((yield from scan.blank()))
        if (yield from scan.either(PART_BEGIN, SECTION_END)) == SECTION_END:
            return
        sink.start()


def _tagged_call(scan: JsonScanner, sink: CallSink, mark: str) -> Reads[None]:
    """Qwen3-Coder's: a tag for the function, and one for each argument."""
    if not mark.startswith("<function"):
        yield from scan.literal_after_blanks("<function=")
    name = yield from scan.name()
    yield from scan.literal(">")
    texts: dict[str, str] = {}
    while True:
        scan.back((yield from scan.blank()))
        if (yield from scan.either("<parameter=", "</function>")) == "</function>":
            break
        key = yield from scan.until(">")
        if key in texts:
            raise Malformed
        text = yield from scan.until("</parameter>")
        texts[key] = text.removeprefix("\n").removesuffix("\n")
    _complete_typed(scan, sink, name, texts)
    yield from scan.literal_after_blanks("</tool_call>")


def _keyed_call(scan: JsonScanner, sink: CallSink) -> Reads[None]:
    """GLM's: a name, and tags for each key and each value."""
    scan.back((yield from scan.blank()))
    name = yield from scan.name()
    texts: dict[str, str] = {}
    while True:
        scan.back((yield from scan.blank()))
        if (yield from scan.either("<arg_key>", "</tool_call>")) == "</tool_call>":
            break
        key = yield from scan.until("</arg_key>")
        if key in texts:
            raise Malformed
        yield from scan.literal_after_blanks("<arg_value>")
        texts[key] = yield from scan.until("</arg_value>")
    _complete_typed(scan, sink, name, texts)


def _python_calls(scan: PythonScanner, sink: CallSink) -> Reads[None]:
    """A list of calls in Python's notation, with keywords."""
    yield from scan.literal_after_blanks("[")
    while True:
        scan.back((yield from scan.blank()))
        name = yield from scan.name()
        yield from scan.literal("(")
        sink.check(name)
        sink.begin(name)
        yield from _keywords(scan, sorted(_properties(sink, name)))
        sink.complete()
        char = yield from scan.blank()
        if char == "]":
            break
        if char != ",":
            raise Malformed
        sink.start()
    char = yield from scan.blank()
    scan.back(char)
    if char == "<":
        yield from scan.literal("<|python_end|>")


def _keywords(scan: PythonScanner, known: Sequence[str]) -> Reads[None]:
    char = yield from scan.blank()
    scan.out.append("{")
    while char != ")":
        scan.back(char)
        key = yield from scan.name(known)
        yield from scan.literal_after_blanks("=")
        scan.out.append(f"{json.dumps(key, ensure_ascii=False)}: ")
        yield from scan.value()
        char = yield from scan.blank()
        if char == ",":
            char = yield from scan.blank()
            scan.out.append(", ")
        elif char != ")":
            raise Malformed
    scan.out.append("}")


def _marked_call(scan: MarkedScanner, sink: CallSink, form: CallFormat) -> Reads[None]:
    """Gemma's: call:name{key:value}, strings between marks."""
    yield from scan.literal_after_blanks("call:")
    name = yield from scan.name()
    scan.known = sorted(_properties(sink, name))
    sink.begin(name)
    yield from _object(scan)
    sink.complete()
    yield from scan.literal_after_blanks(form.last_mark)


def _complete_typed(scan: JsonScanner, sink: CallSink, name: str, texts: Mapping[str, str]) -> None:
    """Complete a call with arguments as strings. The schema decides which of them are other JSON values."""
    schema, known = sink.schema(name), _properties(sink, name)
    values = [f"{_string(key)}: {_typed(text, _types(known.get(key), schema))}" for key, text in texts.items()]
    sink.begin(name)
    scan.out.append(f"{{{', '.join(values)}}}")
    sink.complete()


def _properties(sink: CallSink, name: str) -> Mapping[str, Any]:
    found = sink.schema(name).get("properties")
    return found if isinstance(found, dict) else {}


def _typed(text: str, types: set[str]) -> str:
    """The JSON of an argument of these types. Values other than strings stay as they are written: read and written
    again, numbers that Python has no room for would become others, and halves of surrogate pairs could not be sent."""
    value = _NOTHING if types == {"string"} else _parsed(text.strip())
    if value is _NOTHING:
        return _string(text)
    kind = kind_of(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return text.strip() if fits else _string(text)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The names of the types that a schema allows; none where it does not say."""
    allowed = [types_of(one) for one in alternatives(schema, root)]
    return set().union(*allowed) if all(allowed) else set()


_NOTHING: Any = object()


def _parsed(text: str) -> Any:
    """The JSON value that `text` stands for; `_NOTHING` where it is not JSON."""
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return _NOTHING


def _refused(constant: str) -> Any:
    raise ValueError(constant)
