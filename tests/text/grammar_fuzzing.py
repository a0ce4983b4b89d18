"""Regular expressions and schemas as hostile clients write them: random, nearly right, and repeated until long."""

import json
from typing import Any

from hypothesis import strategies as st

from quire.grammar.limits import MAX_BYTES

REGEX_PIECES = [
    "a", "b", "é", "😀", ".", "|", "*", "+", "?", "^", "$", "(", ")", "(?:", "(?i)", "(?x)", "(?P<n>", "(?=", "(?<!",
    "[", "]", "[^", "-",
    "&&", "~~", "[:alpha:]", "{", "}", "{2}", "{2,1}", "{1,", "{ 1 ", "{,3}", "{0,}", "{999}", "{1000000}",
    "{" + "9" * 5000 + "}", "\\", "\\d", "\\w",
    "\\b", "\\1", "\\p{", "\\p{L}", "\\x{", "\\x{10FFFF}", "\\u{d800}", "\\\\", "/", "#", "\n", "\x00", " ",
]  # fmt: skip
NAMES = ["a", "b", "", "$ref", "x" * 5000, "é", "\x00"]
PATTERNS = st.lists(st.sampled_from(REGEX_PIECES), max_size=12).map("".join)
NUMBERS = st.sampled_from([0, 1, -1, 2, 3.5, 1e300, -1e300, 1e-300, 2**63, 10**100, 10**4000, 999983])
REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/$defs/missing", "http://127.0.0.1/x", "file:///etc/passwd", "#/%"])
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "nothing"])
ANYTHING = st.none() | st.booleans() | NUMBERS | st.sampled_from(NAMES) | st.sampled_from([[], {}, {"a": [1]}])


@st.composite
def repeated(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> str:
    """Some of `texts`, a part of some of them repeated, up to a little more than a grammar may have."""
    text = draw(texts)
    if not text or draw(st.integers(0, 3)):
        return text
    begin = draw(st.integers(0, len(text) - 1))
    part = text[begin : draw(st.integers(begin + 1, len(text)))]
    times = draw(st.sampled_from([2, 30, 1000, MAX_BYTES // len(part.encode()), MAX_BYTES]))
    return text[:begin] + (part * times)[: MAX_BYTES + 10] + text[begin:]


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    values: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES | st.lists(TYPES, max_size=3),
        "properties": named, "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2), "$defs": named,
        "required": st.lists(st.sampled_from(NAMES), max_size=3), "additionalProperties": inner, "items": inner,
        "prefixItems": st.lists(inner, max_size=3), "anyOf": st.lists(inner, max_size=3),
        "oneOf": st.lists(inner, max_size=3), "allOf": st.lists(inner, max_size=3), "not": inner,
        "enum": st.lists(ANYTHING, max_size=4), "const": ANYTHING, "pattern": PATTERNS, "$ref": REFERENCES,
        "format": st.sampled_from(["date", "email", "uuid", "nothing"]), "uniqueItems": st.booleans(),
        "propertyNames": inner, "unevaluatedProperties": inner, "discriminator": st.just({"propertyName": "a"}),
    }  # fmt: skip
    bounds = ["minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems"]
    values |= dict.fromkeys([*bounds, "minProperties", "maxProperties"], NUMBERS)
    right = st.fixed_dictionaries({}, optional=values)
    return right | st.dictionaries(st.sampled_from(sorted(values)), ANYTHING, max_size=2)


def few_keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def some(found: dict[str, Any], names: list[int]) -> dict[str, Any]:
        kept = {number % max(len(found), 1) for number in names}
        return {key: value for number, (key, value) in enumerate(found.items()) if number in kept}

    return st.builds(some, keywords(inner), st.lists(st.integers(0, 40), max_size=3))


schemas = st.recursive(st.just({}) | st.booleans() | ANYTHING, few_keywords, max_leaves=6)
objects = schemas.filter(lambda schema: isinstance(schema, dict))
patterns = repeated(PATTERNS)
schema_texts = repeated(schemas.map(json.dumps)) | repeated(
    st.sampled_from(['{"items":', "[", '{"a":1,', '"\\ud800"', "1"])
)
