"""Adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`. Only LoRA is read."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from quire.errors import InvalidAdapter, InvalidCheckpoint, ModelUnavailable, listed, shown
from quire.files.cache_folder import hub_folder
from quire.files.hub import fetch_adapter, parse_repository
from quire.files.json_file import read_json
from quire.files.safetensors_source import SafetensorsSource
from quire.files.tensor_source import Array
from quire.settings.config import MAX_LORA_RANK

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20  # clients may load adapters: a thousand times as much as one needs
MAX_HEADER_BYTES = 4 << 20  # room for 25,000 tensors

# Initialisations that leave the base model's weights as they are.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# Fields that change what an adapter computes, and the values with which they change nothing.
_OFF: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "bias": ("none",),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "layer_replication": ([],),
    "megatron_config": ({},),
    "arrow_config": ({},),
    "use_bdlora": (False, {}),
}
MAX_REPEATS = 8  # in a pattern of module names
MAX_PATTERNS, MAX_PATTERN = 4096, 1000  # entries, and characters of one
MAX_TRIES = 10**8  # of ways to match patterns with names: they take seconds, in which no other thread runs


@dataclass(frozen=True)
class LowRank:
    """A change of one module's weight: scale * b a, with a [rank, inputs] and b [outputs, rank]."""

    a: str  # name of its tensor
    b: str
    rank: int
    scale: float


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter's files. Its tensors come in pairs of the ranks that its config names."""

    folder: Path
    source: SafetensorsSource
    modules: Mapping[str, LowRank]  # by the name of the module, without PEFT's prefix

    @property
    def rank(self) -> int:
        return max(change.rank for change in self.modules.values())

    def read(self, name: str) -> Array:
        """A tensor as float32. Raises `InvalidAdapter`: clients may replace files while they are read."""
        try:
            return self.source.read_copy(name).astype(np.float32)
        except InvalidCheckpoint as error:
            raise InvalidAdapter(str(error)) from error


def locate_adapter(
    place: str,
    *,
    token: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    hub_cache: Path | None = None,
) -> Path:
    """The folder of an adapter: `place` is one, or `org/name[@revision]` on the hub."""
    folder = Path(place).expanduser()
    if folder.is_dir():
        return folder
    repository = parse_repository(place)
    if repository is None or repository.gguf is not None or "/" not in repository.id:
        raise ModelUnavailable(f"{shown(place)}: no such folder, and no repository on the hub either")
    hub = hub_folder(cache_dir, hub_cache)
    return fetch_adapter(repository.id, revision=repository.revision, token=token, offline=offline, cache_dir=hub)


def open_adapter(folder: str | Path) -> PeftAdapter:
    """Open the adapter in a folder. Only headers are read. Raises `InvalidAdapter`."""
    folder = Path(folder)
    try:
        if not (folder / CONFIG_NAME).exists():
            raise InvalidAdapter(f"{folder}: there is no {CONFIG_NAME}, which PEFT writes with every adapter")
        config = read_json(folder / CONFIG_NAME, MAX_CONFIG_BYTES)
        if not (folder / WEIGHTS_NAME).exists():
            pickled = "; adapter_model.bin is not read, save_pretrained writes safetensors by default"
            more = pickled if (folder / "adapter_model.bin").exists() else ""
            raise InvalidAdapter(f"{folder}: there is no {WEIGHTS_NAME}{more}")
        source = SafetensorsSource(folder, WEIGHTS_NAME, MAX_HEADER_BYTES)
    except InvalidCheckpoint as error:
        raise InvalidAdapter(str(error)) from error
    fields = _Fields(folder, config)
    fields.refuse_other_kinds()
    modules = _modules(folder, source, fields)
    fields.require_targets(modules)
    return PeftAdapter(folder, source, modules)


class _Fields:
    """An adapter's config."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder, self._config = folder, config
        self._rank = self._integer("r")
        self._alpha = self._number("lora_alpha", config.get("lora_alpha", 8))
        self._ranks, self._alphas = self._patterns("rank_pattern"), self._patterns("alpha_pattern")
        self._is_rank_stabilised = self._flag("use_rslora")

    def refuse_other_kinds(self) -> None:
        config = self._config
        if config.get("peft_type") != "LORA":
            self._refuse("peft_type", "adapters of LoRA are supported")
        for name, values in _OFF.items():
            value = config.get(name)
            if value is not None and not any(value == off and type(value) is type(off) for off in values):
                self._refuse(name, "it is not supported")
        start = config.get("init_lora_weights", True)
        if not any(start is plain or start == plain for plain in _PLAIN_STARTS):
            self._refuse("init_lora_weights", "adapters that change the weights of the base model are not supported")
        self._flag("fan_in_fan_out")  # a fact about the base model, which is known

    def refuse_slow_patterns(self, modules: Collection[str]) -> None:
        """Refuse expressions that could be tried for hours: `re` tries every way to match before it says no."""
        longest, num_dots = max(map(len, modules)), max(module.count(".") for module in modules)
        for name in ("rank_pattern", "alpha_pattern"):
            ways = sum(_num_ways(key, longest) for key in self._config.get(name) or {})
            if ways * (1 + num_dots) * len(modules) > MAX_TRIES:
                self._refuse(name, "to match it with the names of modules could take too long")

    def of_module(self, module: str) -> tuple[int, float]:
        """The rank and the scale that the config gives a module."""
        rank = int(_matching(self._ranks, module, self._rank))
        alpha = _matching(self._alphas, module, self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._is_rank_stabilised else rank)

    def require_targets(self, modules: Mapping[str, LowRank]) -> None:
        """A list of `target_modules` names modules that have tensors. A regular expression is not run."""
        targets = self._config.get("target_modules")
        if isinstance(targets, str):
            return
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            self._refuse("target_modules", "it must be a list of names, a regular expression or all-linear")
        endings = {ending for module in modules for ending in _endings(module)}
        missing = [name for name in targets if name not in endings]
        if missing:
            raise InvalidAdapter(
                f"{self._folder}: target_modules has {listed(missing)}, but there is no tensor of them"
            )

    def _refuse(self, name: str, rule: str) -> NoReturn:
        raise InvalidAdapter(f"{self._folder / CONFIG_NAME}: {name} is {shown(self._config.get(name))}; {rule}")

    def _integer(self, name: str) -> int:
        value = self._config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LORA_RANK:
            self._refuse(name, f"it must be between 1 and {MAX_LORA_RANK}")
        return value

    def _number(self, name: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        except OverflowError:  # an integer beyond all floats
            number = math.inf
        if not math.isfinite(number):
            self._refuse(name, "it must be a number")
        return number

    def _flag(self, name: str) -> bool:
        value = self._config.get(name) or False
        if not isinstance(value, bool):
            self._refuse(name, "it must be true or false")
        return value

    def _patterns(self, name: str) -> list[tuple["re.Pattern[str]", float]]:
        """Ends of module names, as regular expressions, with a number each; the first that matches counts."""
        table = self._config.get(name) or {}
        if not isinstance(table, dict):
            self._refuse(name, "it must be a table from module names to numbers")
        if len(table) > MAX_PATTERNS or any(len(key) > MAX_PATTERN for key in table):
            self._refuse(name, f"it can have {MAX_PATTERNS} patterns, of at most {MAX_PATTERN} characters each")
        patterns = []
        for key, value in table.items():
            number = self._number(name, value)
            if name == "rank_pattern" and not (number.is_integer() and 1 <= number <= MAX_LORA_RANK):
                self._refuse(name, f"ranks must be between 1 and {MAX_LORA_RANK}")
            try:
                patterns.append((re.compile(rf"(.*\.)?({key})"), number))
            except (re.error, OverflowError, RecursionError):
                self._refuse(name, f"{shown(key)} is not a regular expression")
        return patterns


def _matching(patterns: list[tuple["re.Pattern[str]", float]], module: str, default: float) -> float:
    return next((number for pattern, number in patterns if pattern.fullmatch(module)), default)


def _num_ways(pattern: str, length: int) -> float:
    """At least as many as there are ways to match `pattern` with a name of `length` characters. Infinity for groups
    that are repeated or are more than groups, and for many repetitions, which no table of PEFT's needs."""
    bare = re.sub(r"\\.", "_", pattern, flags=re.DOTALL).replace("(?:", "(")
    num_repeats = sum(bare.count(char) for char in "*+{")
    if num_repeats > MAX_REPEATS or re.search(r"\)[*+{]|\(\?", bare):
        return math.inf
    ways, groups = float(math.comb(length + num_repeats, num_repeats)), [1]  # by open group, its alternatives
    for char in bare:
        if char == "(":
            groups.append(1)
        elif char == "|":
            groups[-1] += 1
        elif char == ")" and len(groups) > 1:
            ways *= groups.pop()
        elif char == "?":
            ways *= 2
    return ways * groups[0]


def _endings(module: str) -> list[str]:
    """The name of a module, and those by which the modules that it is in call it."""
    parts = module.split(".")
    return [".".join(parts[begin:]) for begin in range(len(parts))]


def _modules(folder: Path, source: SafetensorsSource, fields: _Fields) -> dict[str, LowRank]:
    """Every module that the adapter changes. Each tensor belongs to one."""
    infos = source.tensors()
    unknown = [name for name in infos if _part_of(name) is None]
    if unknown:
        magnitudes = any("lora_magnitude_vector" in name for name in unknown)
        embeddings = any("lora_embedding_" in name for name in unknown)
        why = "DoRA is" if magnitudes else "adapters of embeddings are" if embeddings else "such tensors are"
        raise InvalidAdapter(f"{folder / WEIGHTS_NAME}: {why} not supported: {listed(unknown)}")
    found: dict[str, dict[str, str]] = {}
    for name in infos:
        module, part = _part_of(name) or ("", "")
        if part in found.setdefault(module, {}):  # with PEFT's prefix and without
            raise InvalidAdapter(f"{folder / WEIGHTS_NAME}: {module}.lora_{part}.weight is there twice")
        found[module][part] = name
    if not found:
        raise InvalidAdapter(f"{folder / WEIGHTS_NAME}: there are no tensors")
    fields.refuse_slow_patterns(found)
    modules = {}
    for module, parts in found.items():
        if len(parts) != 2:
            missing = ({"A", "B"} - parts.keys()).pop()
            raise InvalidAdapter(f"{folder / WEIGHTS_NAME}: {module}.lora_{missing}.weight is missing")
        rank, scale = fields.of_module(module)
        shapes = {part: infos[parts[part]].shape for part in "AB"}
        for part, axis in (("A", 0), ("B", 1)):
            if len(shapes[part]) != 2 or shapes[part][axis] != rank:
                wanted = f"[{rank}, inputs]" if part == "A" else f"[outputs, {rank}]"
                raise InvalidAdapter(
                    f"{folder / WEIGHTS_NAME}: {parts[part]} is {list(shapes[part])}; by the config it is {wanted}"
                )
        modules[module] = LowRank(parts["A"], parts["B"], rank, scale)
    return modules


def _part_of(name: str) -> tuple[str, str] | None:
    """The module and "A" or "B" of a tensor; None for one that is neither."""
    found = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight", name)
    return None if found is None else (found[1], found[2])
