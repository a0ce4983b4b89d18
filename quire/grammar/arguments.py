"""The grammar of arguments that a model writes one by one, not as a JSON object."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from quire.errors import InvalidRequest
from quire.grammar.closed_schema import guided_schema
from quire.grammar.lark import Marks, terms, text_up_to
from quire.grammar.references import moved, references
from quire.text.alternatives import alternatives, says, types_of
from quire.text.tools import Tool

MAX_CHOSEN = 24  # arguments that are tracked one by one; with more, any may occur in any order
MAX_COPIED = 4 * 2**20
_DEFINITIONS = ("$defs", "definitions")
_INTO_DEFINITIONS = ("#/$defs/", "#/definitions/")
_WHOLE = "#/$defs/whole"  # the schema of all arguments, among the definitions of one
_NO_RULE = ("title", "description", "default", "examples", "additionalProperties", "type", "properties", "required")
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_SCALARS = ("string", "integer", "number", "boolean", "null")


class ArgumentRules:
    """The arguments of one function, by their schema: those that are required, and others, in its order.

    Some formats cannot express all of a schema. That is an error if the tool is `strict`.
    """

    def __init__(self, prefix: str, tool: Tool, schema: Mapping[str, Any], marks: Marks) -> None:
        self._prefix = prefix
        self._marks = marks
        self._is_strict = tool.strict
        self._schema = schema
        self._num_copied = 0  # bytes that stand beside the schemas of arguments
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        self._required = frozenset(key for key in (required or ()) if isinstance(key, str))
        self.keys = list(self._properties)
        self.rules: list[str] = []
        others = [key for key in schema if key not in (*_NO_RULE, *_DEFINITIONS) and not key.startswith("x-")]
        if others or schema.get("additionalProperties") not in (None, False):
            self._loses(others[0] if others else "additionalProperties")
        for key in self._required - set(self.keys):
            raise InvalidRequest(f"required has {key!r}, which is not among the properties")

    def json_value(self, key: str) -> str:
        """A rule for the value in JSON."""
        name = self._rule_name(key)
        self.rules.append(f"{name}: %json {json.dumps(guided_schema(self._standing_alone(key), self._is_strict))}")
        return name

    def text_item(self, before: str, key: str, end: str, after: str = "") -> str:
        """An expression for an argument with strings as plain text up to `end`."""
        parts = self._alternatives(key)
        texts = [["null"] if types_of(part) == {"null"} else _strings(part) for part in parts]
        if all(texts):
            chosen = " | ".join(terms(text + end, self._marks) for one in texts for text in one)
            return f"{before} ({chosen}) {after}"
        types = [types_of(part) for part in parts]
        if all(types) and not any("string" in one for one in types):
            return f"{before} {self.json_value(key)} {terms(end, self._marks)} {after}"
        for part in parts:
            self._check_text(key, part)
        name = self._rule_name(key)
        self.rules.append(text_up_to(name, end, self._marks))
        return f"{before} {name} {after}"

    def marked_value(self, key: str, quote: str) -> str:
        """An expression for a value with strings between two `quote` marks."""
        parts = self._alternatives(key)
        if not all(_strings(part) or part.get("type") in _SCALARS for part in parts):
            self._loses(f"properties.{key}")
            return self._any_marked(quote)
        return f"({' | '.join(self._marked(key, number, part, quote) for number, part in enumerate(parts))})"

    def _marked(self, key: str, number: int, schema: Mapping[str, Any], quote: str) -> str:
        if values := _strings(schema):
            return " | ".join(terms(quote + value + quote, self._marks) for value in values)
        name = f"{self._rule_name(key)}_{number}"
        if schema["type"] != "string":
            self.rules.append(f"{name}: %json {json.dumps(guided_schema(dict(schema), self._is_strict))}")
            return name
        self._check_text(key, schema)
        self.rules.append(text_up_to(name, quote, self._marks))
        return f"{terms(quote, self._marks)} {name}"

    def one_by_one(self, items: Sequence[str]) -> str:
        """Items after each other."""
        if len(items) > MAX_CHOSEN:
            return "(" + " | ".join(items) + ")*"
        return " ".join(
            f"({item})" if key in self._required else f"({item})?" for key, item in zip(self.keys, items, strict=True)
        )

    def separated(self, items: Sequence[str], separator: str) -> str:
        """Items with `separator` between them."""
        between = json.dumps(separator)
        if len(items) > MAX_CHOSEN:
            return f"(({' | '.join(items)}) ({between} ({' | '.join(items)}))*)?"
        choices = []
        for first, key in enumerate(self.keys):
            rest = [
                f"({between} {item})" + ("" if later in self._required else "?")
                for later, item in zip(self.keys[first + 1 :], items[first + 1 :], strict=True)
            ]
            choices.append(" ".join([items[first], *rest]))
            if key in self._required:
                break
        if not choices:
            return '""'
        return f"({' | '.join(choices)})" + ("" if self._required else "?")

    @cached_property
    def _referred(self) -> dict[str, Any] | None:
        """The definitions; None if references name other parts of the schema, too."""
        if all(one.startswith(_INTO_DEFINITIONS) for one in references(self._schema)):
            return {name: self._schema[name] for name in _DEFINITIONS if name in self._schema}
        return None

    @cached_property
    def _num_referred(self) -> int:
        """The bytes of what one argument may refer to."""
        return len(json.dumps(self._schema if self._referred is None else self._referred))

    def _standing_alone(self, key: str) -> dict[str, Any]:
        """The schema of an argument, with what it may refer to."""
        found = self._properties[key]
        if not isinstance(found, Mapping):
            return {}
        if next(references(found), None) is None:
            return dict(found)
        self._num_copied += self._num_referred
        if self._num_copied > MAX_COPIED:
            raise InvalidRequest(f"with all that they refer to, arguments have over {MAX_COPIED} bytes")
        if self._referred is not None:
            return {**self._referred, **found}
        return {**moved(found, _WHOLE), "$defs": {"whole": moved(self._schema, _WHOLE)}}

    def _alternatives(self, key: str) -> list[Mapping[str, Any]]:
        return alternatives(self._properties[key], self._schema)

    def _check_text(self, key: str, schema: Mapping[str, Any]) -> None:
        """Plain text keeps to strings, and to values of other types that may be any of theirs."""
        is_text = schema.get("type") == "string"
        lost = [name for name in (*_OF_STRINGS, "enum", "const") if name in schema] if is_text else []
        if lost or not (is_text or (schema.get("type") in _SCALARS and says(schema) == {"type"})):
            self._loses(f"properties.{key}" + (f".{lost[0]}" if lost else ""))

    def _loses(self, place: str) -> None:
        if self._is_strict:
            raise InvalidRequest(f"strict is true, and the format of this model's calls cannot keep to {place}")

    def _any_marked(self, quote: str) -> str:
        name = f"{self._prefix}_any"
        if not any(rule.startswith(f"{name}:") for rule in self.rules):
            mark = terms(quote, self._marks)
            self.rules += [
                f'{name}: {mark} {name}_text | /-?[0-9]+(\\.[0-9]+)?/ | "true" | "false" | "null" | {name}_list'
                f" | {name}_object",
                f'{name}_list: "[" ({name} ("," {name})*)? "]"',
                f'{name}_object: "{{" ({name}_member ("," {name}_member)*)? "}}"',
                f"{name}_member: /[A-Za-z0-9_.-]+:/ {name}",
                text_up_to(f"{name}_text", quote, self._marks),
            ]
        return name

    def _rule_name(self, key: str) -> str:
        return f"{self._prefix}_{self.keys.index(key)}"


def _strings(schema: Mapping[str, Any]) -> list[str]:
    """The strings that a schema lists; none where it does not, or lists other values, too."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []
