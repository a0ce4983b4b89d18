"""The fields of a model's config, read with their types."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from quire.errors import InvalidCheckpoint, UnsupportedModel, shown
from quire.models.field_ranges import LARGEST_INTEGER, LARGEST_NUMBER, RANGES

Item = TypeVar("Item")


class Fields:
    """A config in the Hugging Face spelling. A field that is null counts as absent.

    Reading a field raises `InvalidCheckpoint` for a value that makes no sense and `UnsupportedModel` for one that asks
    for something Quire does not do. Both name the field and the value.
    """

    def __init__(self, config: Mapping[str, Any], family: str, path: str = "") -> None:
        self._config = config
        self._path = path  # of the fields within the whole config, for messages
        self.family = family

    def __contains__(self, name: str) -> bool:
        return self._config.get(name) is not None

    def is_null(self, name: str) -> bool:
        """True if the field is present as null, which turns off a default of the family."""
        return name in self._config and self._config[name] is None

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def get(self, name: str) -> Any:
        return self._config.get(name)

    def within(self, name: str, defaults: Mapping[str, Any] | None = None) -> "Fields":
        """The fields within a field; none if it is absent. `defaults` fill in those that it lacks."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.invalid(name, "an object is needed")
        return Fields({**(defaults or {}), **(value or {})}, self.family, f"{self._path}{name}.")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number in the range of the field, which begins above zero."""
        value = self._value(name, default)
        least, most = RANGES.get(name, (1, LARGEST_INTEGER))
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.invalid(name, f"a whole number from {least} to {most} is needed", value)
        return value

    def whole(self, name: str, default: int) -> int:
        """A whole number, zero included."""
        value = self.get(name)
        return 0 if value == 0 and type(value) is int else self.integer(name, default)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        return self.integer(name, default) if name in self or default is not None else None

    def number(self, name: str, default: float | None = None) -> float:
        """A number in the range of the field."""
        return self._in_range(name, self._value(name, default))

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.invalid(name, "true or false is needed")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.invalid(name, "a string is needed")
        return value

    def integers(self, name: str, length: int | None = None) -> list[int]:
        value = self._value(name, None)
        if not isinstance(value, list) or not all(type(item) is int for item in value):  # a boolean is an int
            raise self.invalid(name, "a list of whole numbers is needed")
        return self._of_length(name, value, length)

    def numbers(self, name: str, length: int) -> list[float]:
        value = self._value(name, None)
        if not isinstance(value, list):
            raise self.invalid(name, "a list of numbers is needed")
        return [self._in_range(name, item) for item in self._of_length(name, value, length)]

    def texts(self, name: str, length: int) -> list[str]:
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.invalid(name, "a list of strings is needed")
        return self._of_length(name, value, length)

    def only(self, name: str, *supported: Any) -> None:
        """Refuse the config unless the field is absent or has one of these values."""
        if name in self and self.get(name) not in supported:
            raise self.unsupported(name, f"known values are {', '.join(map(repr, supported))}")

    def invalid(self, name: str, reason: str, value: Any = None) -> InvalidCheckpoint:
        """`value` is given if it is a part of the field or a default."""
        value = self.get(name) if value is None else value
        return InvalidCheckpoint(f"config: {self._path}{name} = {shown(value)}: {reason}")

    def unsupported(self, name: str, reason: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.family}: {self._path}{name} = {shown(self.get(name))} is not supported: {reason}"
        )

    def _in_range(self, name: str, value: Any) -> float:
        least, most = RANGES.get(name, (-LARGEST_NUMBER, LARGEST_NUMBER))
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.invalid(name, f"a number from {least:g} to {most:g} is needed", value)
        return float(value)

    def _of_length(self, name: str, value: list[Item], length: int | None) -> list[Item]:
        if length is not None and len(value) != length:
            raise self.invalid(name, f"{length} items are needed, there are {len(value)}")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise InvalidCheckpoint(f"config: {self._path}{name} is missing, which a {self.family} model needs")
        return value
