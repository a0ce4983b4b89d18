"""Quire serves large language models on JAX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from quire import errors
    from quire.llm import LLM, Completion, Delta
    from quire.request import Grammar, SamplingParams, json_schema, regex
    from quire.settings.config import Config

__all__ = [
    "LLM",
    "Completion",
    "Config",
    "Delta",
    "Grammar",
    "SamplingParams",
    "__version__",
    "errors",
    "json_schema",
    "regex",
]

# Imported when first asked for, so that `import quire` and the command's help cost nothing.
_HOMES = {
    "LLM": "quire.llm",
    "Completion": "quire.llm",
    "Delta": "quire.llm",
    "Config": "quire.settings.config",
    "Grammar": "quire.request",
    "SamplingParams": "quire.request",
    "json_schema": "quire.request",
    "regex": "quire.request",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("quire.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
