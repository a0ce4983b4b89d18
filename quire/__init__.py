"""Quire serves large language models on JAX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from quire import errors
    from quire.config import Config
    from quire.llm import LLM, Completion, Delta
    from quire.request import SamplingParams

__all__ = ["LLM", "Completion", "Config", "Delta", "SamplingParams", "__version__", "errors"]

# Imported when first asked for, so that `import quire` and the command's help cost nothing.
_HOMES = {
    "LLM": "quire.llm",
    "Completion": "quire.llm",
    "Delta": "quire.llm",
    "Config": "quire.config",
    "SamplingParams": "quire.request",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("quire.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
