"""Settings that do not go with each other, with a platform, or with the layers of a model.

`CONFLICTS` is the one table of them. An engine that is planned, a server that starts, `quire doctor` and the page of
models read it. The limits of a value by itself are in `config.py`, and those that follow from other values in
`resolve.py`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from quire.errors import InvalidSetting, shown
from quire.layer_kind import LayerKind
from quire.settings.dtypes import CACHE_DTYPES

LEAST_REPRODUCIBLE_PAGE = 32  # tokens: a tile of a prompt, which the check of programs has in one page

_PLAIN = re.compile(r"[\w./:=@+-]{1,100}")


class ModelTraits(NamedTuple):
    """The traits of a model that settings are refused for."""

    name: str
    kinds: tuple[LayerKind, ...] = ()
    windows: str | None = None  # of its layers, in words, if none of them reads all positions


@dataclass(frozen=True)
class Case:
    """Everything that is known when refusals are looked for. Nothing is refused for what is not known yet."""

    settings: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)  # of values that were not asked for
    platform: str | None = None
    is_native: bool = True  # whether all products and norms on a CPU are those of the native library
    model: ModelTraits | None = None
    draft: ModelTraits | None = None

    def named(self, name: str) -> str:
        value = self.settings[name]
        if value is True:
            return name
        return f"{name} = {_in_words(value)}"


# Says how something keeps a setting from being used, as in "needs prefix_caching"; None if nothing does.
Obstacle = Callable[[Case], str | None]


class Conflict(NamedTuple):
    setting: str
    obstacle: Obstacle
    reason: str
    remedy: str | None = "leave one of them out"
    is_on: Callable[[Any], bool] = bool

    def message(self, case: Case) -> str | None:
        """The words of the refusal; None where the setting is accepted."""
        value = case.settings.get(self.setting)
        if not self.is_on(value) or (obstacle := self.obstacle(case)) is None:
            return None
        origin = f" ({case.origins[self.setting]})" if self.setting in case.origins else ""
        remedy = "" if self.remedy is None else f". Remedy: {self.remedy.format_map(case.settings)}"
        return f"{self.setting} is {_in_words(value)}{origin}; it {obstacle}: {self.reason}{remedy}"


def settings_of(*asked: Any) -> dict[str, Any]:
    """The values of dataclasses of settings, by name."""
    return {each.name: getattr(kind, each.name) for kind in asked for each in fields(kind)}


def refuse(case: Case) -> None:
    """Raise InvalidSetting for the first line of the table that applies."""
    for conflict in CONFLICTS:
        if (message := conflict.message(case)) is not None:
            raise InvalidSetting(message)


def refused_for(model: ModelTraits, platform: str) -> dict[str, str]:
    """The settings that a model does not have there, each with what is in the way."""
    case = Case({}, platform=platform, model=model)
    return {each.setting: words for each in CONFLICTS if (words := each.obstacle(case)) is not None}


def _in_words(value: Any) -> str:
    return text if _PLAIN.fullmatch(text := str(value)) else shown(value)


def _are_several(value: int | None) -> bool:
    return (value or 1) > 1


def _is_given(value: Any) -> bool:
    return value is not None


def _is_eight_bits(value: str | None) -> bool:
    return value in CACHE_DTYPES


def _is_small_page(value: int | None) -> bool:
    return value is not None and value < LEAST_REPRODUCIBLE_PAGE


def _is_no_float32(value: str | None) -> bool:
    return value not in (None, "float32")


def _answers(role: str | None) -> bool:
    return role in ("prefill", "both")


def _beside(name: str, is_on: Callable[[Any], bool] = bool) -> Obstacle:
    """Another setting."""
    return lambda case: f"does not go with {case.named(name)}" if is_on(case.settings.get(name)) else None


def _without(*names: str) -> Obstacle:
    """None of these settings is on."""

    def obstacle(case: Case) -> str | None:
        is_known = all(name in case.settings for name in names)
        return f"needs {' or '.join(names)}" if is_known and not any(map(case.settings.get, names)) else None

    return obstacle


def _on(platform: str, obstacle: Obstacle) -> Obstacle:
    def there(case: Case) -> str | None:
        words = obstacle(case) if case.platform == platform else None
        return None if words is None else f"{words} on a {platform.upper()}"

    return there


def _layers_without(flag: str) -> Obstacle:
    """Layers of the model, or of its draft, whose kind lacks something."""

    def obstacle(case: Case) -> str | None:
        for model, role in ((case.model, ""), (case.draft, ", the draft_model")):
            lacking = [kind.layers for kind in model.kinds if not getattr(kind, flag)] if model is not None else []
            if model is not None and lacking:
                return f"does not go with the {lacking[0]} of {model.name}{role}"
        return None

    return obstacle


def _all_in_pages(case: Case) -> str | None:
    if case.model is None or not all(kind.in_pages for kind in case.model.kinds):
        return None
    return f"does not go with {case.model.name}, whose layers keep everything in pages"


def _windows_alone(case: Case) -> str | None:
    if case.model is None or case.model.windows is None:
        return None
    return f"does not go with the windows of all layers of {case.model.name} ({case.model.windows})"


def _no_native_library(case: Case) -> str | None:
    return "needs the native library with all its parts" if case.platform == "cpu" and not case.is_native else None


def _on_other_devices(case: Case) -> str | None:
    return None if case.platform in (None, "cpu", "gpu") else f"does not go with a {case.platform}"


_CUT_BY_ROWS = "products with adapters are cut by the number of rows"
_ROWS_APART = "only the native library computes each row by itself, in float32 and on one device"
_ONE_ENGINE = "an engine of several processes has none"

CONFLICTS = (
    # The layers of a model.
    Conflict(
        "speculate",
        _layers_without("rolls_back"),
        "their state cannot be taken back to where a guess was wrong",
        "leave it out",
    ),
    Conflict(
        "host_cache_gib",
        _layers_without("continues_from_pages"),
        "pages alone do not continue a prompt",
        "leave it out, and --role and --cache-folder",
    ),
    Conflict(
        "kv_cache_dtype",
        _layers_without("has_coded_pages"),
        "these are cached in dtype, which is more exact",
        "--kv-cache-dtype {dtype}",
        _is_eight_bits,
    ),
    Conflict(
        "reproducible",
        _on("gpu", _layers_without("has_fixed_order")),
        "their kernels are cut by the number of rows",
        "leave it out",
    ),
    Conflict("snapshots", _all_in_pages, "a prompt continues from pages alone", "leave it out", _is_given),
    Conflict("draft_model", _windows_alone, "a draft has pages of all positions", "leave it out"),
    # Guesses.
    Conflict("draft_model", _without("speculate"), "that many tokens are guessed in one step, at most", None),
    Conflict("draft_model", _beside("tensor_parallel", _are_several), "a draft runs on one device", "leave it out"),
    # Rows that do not depend on others.
    Conflict("reproducible", _on_other_devices, "it is for CPUs and GPUs", "leave it out"),
    Conflict("reproducible", _on("cpu", _beside("dtype", _is_no_float32)), _ROWS_APART),
    Conflict("reproducible", _on("cpu", _beside("tensor_parallel", _are_several)), _ROWS_APART),
    Conflict(
        "reproducible",
        _no_native_library,
        "a C++ compiler makes it at the first start, and the log says why it is not there",
        "mend that, or leave it out",
    ),
    *(
        Conflict(name, _on("gpu", _beside("reproducible")), reason, is_on=is_on)
        for name, reason, is_on in (
            ("speculate", "guesses are computed by the kernel of prompts, other tokens by that of decodes", bool),
            ("tensor_parallel", "devices add their parts in an order that depends on the rows", _are_several),
            ("lora_adapters", _CUT_BY_ROWS, bool),
            ("adapter_folder", _CUT_BY_ROWS, bool),
            ("max_loras", _CUT_BY_ROWS, bool),
            ("max_burst", "tokens of a burst have a program of their own", _are_several),
            ("page_size", f"the check of programs needs pages of {LEAST_REPRODUCIBLE_PAGE} tokens", _is_small_page),
        )
    ),
    # The prefix cache, and what keeps its pages.
    Conflict("host_cache_gib", _without("prefix_caching"), "it keeps the pages of that cache", None),
    Conflict("cache_folder", _without("prefix_caching"), "it keeps the pages of that cache", None),
    Conflict("role", _without("prefix_caching"), "it exchanges the pages of that cache", None),
    Conflict("snapshots", _without("prefix_caching"), "they are a part of that cache", None),
    # Adapters.
    Conflict("max_loras", _without("lora_adapters", "adapter_folder"), "there are no adapters", None, _is_given),
    Conflict("max_lora_rank", _without("lora_adapters", "adapter_folder"), "there are no adapters", None, _is_given),
    # Several devices, processes and engines.
    Conflict("compile_processes", _beside("tensor_parallel", _are_several), "threads compile for several devices"),
    Conflict(
        "data_parallel",
        _beside("group_size", _are_several),
        "a group is one engine of several processes",
        is_on=_are_several,
    ),
    Conflict("data_parallel", _beside("role", _answers), "one engine listens at peer_address", is_on=_are_several),
    *(
        Conflict(name, _beside("group_size", _are_several), _ONE_ENGINE)
        for name in (
            "lora_adapters", "adapter_folder", "max_loras", "draft_model", "host_cache_gib", "cache_folder", "role",
        )
    ),
)  # fmt: skip
