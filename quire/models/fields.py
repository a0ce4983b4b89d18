"""The fields of a model's config, read with their types."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from quire.errors import InvalidCheckpoint, UnsupportedModel

Item = TypeVar("Item")


class Fields:
    """A config in the Hugging Face spelling. A field that is null counts as absent.

    What it reads is right or raises: `InvalidCheckpoint` for a value that makes no sense, `UnsupportedModel` for one
    that asks for something Quire does not do. Both name the field and the value.
    """

    def __init__(self, config: Mapping[str, Any], family: str, path: str = "") -> None:
        self._config = config
        self._path = path  # of the fields within the whole config, for messages
        self.family = family

    def __contains__(self, name: str) -> bool:
        return self._config.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is there without a value, which turns off what a family has by default."""
        return name in self._config and self._config[name] is None

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def get(self, name: str) -> Any:
        return self._config.get(name)

    def within(self, name: str, defaults: Mapping[str, Any] | None = None) -> "Fields":
        """The fields of a field; none where it is absent. `defaults` are for those it does not have."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.invalid(name, "an object is needed")
        return Fields({**(defaults or {}), **(value or {})}, self.family, f"{self._path}{name}.")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.invalid(name, "a whole number above 0 is needed")
        return value

    def whole(self, name: str, default: int) -> int:
        """A whole number, zero included."""
        return 0 if self.get(name) == 0 else self.integer(name, default)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        return self.integer(name, default) if name in self or default is not None else None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(name, "a number is needed")
        return float(value)

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
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.invalid(name, "a list of whole numbers is needed")
        return self._of_length(name, value, length)

    def numbers(self, name: str, length: int) -> list[float]:
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self.invalid(name, "a list of numbers is needed")
        return self._of_length(name, [float(item) for item in value], length)

    def texts(self, name: str, length: int) -> list[str]:
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.invalid(name, "a list of strings is needed")
        return self._of_length(name, value, length)

    def only(self, name: str, *supported: Any) -> None:
        """Refuse the config unless the field is absent or has one of these values."""
        if name in self and self.get(name) not in supported:
            raise self.unsupported(name, f"known values are {', '.join(map(repr, supported))}")

    def invalid(self, name: str, reason: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"config: {self._path}{name} = {self.get(name)!r}: {reason}")

    def unsupported(self, name: str, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.family}: {self._path}{name} = {self.get(name)!r} is not supported: {reason}")

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
