"""The grammar of arguments that a model writes one by one, not as a JSON object."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest
from quire.grammar.closed_schema import guided_schema
from quire.grammar.lark import Marks, terms, text_up_to
from quire.text.tools import Tool

MAX_CHOSEN = 24  # arguments that are tracked one by one; with more, any may occur in any order
_DEFINITIONS = ("$defs", "definitions")
_NO_RULE = ("title", "description", "default", "examples", "additionalProperties", "type", "properties", "required")
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_STRING = ("string",)


class ArgumentRules:
    """The arguments of one function, by their schema: those that are required, and others, in its order.

    Some formats cannot express all of a schema. That is an error if the tool is `strict`.
    """

    def __init__(self, prefix: str, tool: Tool, schema: Mapping[str, Any], marks: Marks) -> None:
        self._prefix = prefix
        self._marks = marks
        self._is_strict = tool.strict
        self._definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
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
        self.rules.append(f"{name}: %json {json.dumps(guided_schema(self._schema(key), self._is_strict))}")
        return name

    def text_item(self, before: str, key: str, end: str, after: str = "") -> str:
        """An expression for an argument with strings as plain text up to `end`."""
        schema = self._schema(key)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            chosen = " | ".join(terms(value + end, self._marks) for value in values)
            return f"{before} ({chosen}) {after}"
        if not self._may_be_text(schema):
            return f"{before} {self.json_value(key)} {terms(end, self._marks)} {after}"
        self._check_text(key, schema)
        name = self._rule_name(key)
        self.rules.append(text_up_to(name, end, self._marks))
        return f"{before} {name} {after}"

    def marked_value(self, key: str, quote: str) -> str:
        """An expression for a value with strings between two `quote` marks."""
        schema = self._schema(key)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return "(" + " | ".join(terms(quote + value + quote, self._marks) for value in values) + ")"
        kind = schema.get("type")
        if kind in ("integer", "number", "boolean", "null"):
            return self.json_value(key)
        if kind == "string":
            self._check_text(key, schema)
            name = self._rule_name(key)
            self.rules.append(text_up_to(name, quote, self._marks))
            return f"{terms(quote, self._marks)} {name}"
        self._loses(f"properties.{key}")
        return self._any_marked(quote)

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

    def _schema(self, key: str) -> dict[str, Any]:
        found = self._properties[key]
        return {**self._definitions, **found} if isinstance(found, Mapping) else dict(self._definitions)

    def _may_be_text(self, schema: Mapping[str, Any]) -> bool:
        kind = schema.get("type")
        return kind not in ("integer", "number", "boolean", "null", "object", "array")

    def _check_text(self, key: str, schema: Mapping[str, Any]) -> None:
        lost = [name for name in _OF_STRINGS if name in schema]
        if lost or schema.get("type") != "string":
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
