"""Adapters of a model in this process."""

from collections.abc import Mapping
from pathlib import Path

from quire.errors import InvalidSetting


def as_setting(adapters: Mapping[str, str | Path]) -> tuple[str, ...]:
    """The value of the setting `lora_adapters`, which separates adapters by commas and leaves out spaces around."""
    for name, folder in adapters.items():
        if "," in f"{name}{folder}" or "=" in name:
            raise InvalidSetting(f"adapters has {name!r}: {str(folder)!r}; a comma, or = in a name, cannot be in it")
        if (given := f"{name}={folder}") != given.strip():
            raise InvalidSetting(f"adapters has {name!r}: {str(folder)!r}; it cannot begin or end with a space")
    return tuple(f"{name}={folder}" for name, folder in adapters.items())
