"""References within a schema."""

from collections.abc import Iterator, Mapping
from typing import Any


def references(schema: Any) -> Iterator[str]:
    """All that a schema and the schemas in it have."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            left += one.values()
            if isinstance(one.get("$ref"), str):
                yield one["$ref"]
        elif isinstance(one, list):
            left += one


def moved(schema: Any, place: str) -> Any:
    """`schema` with references that begin at `place`, where it now stands."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else moved(value, place)
            for key, value in schema.items()
        }
    return [moved(one, place) for one in schema] if isinstance(schema, list) else schema
