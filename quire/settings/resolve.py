"""Decides the settings that were left open, and logs each choice with its reason."""

import sys
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidSetting
from quire.settings.choice import ASKED_FOR, Choice, chosen
from quire.settings.config import Config, refuse_out_of_range
from quire.settings.dtypes import PLATFORM_ALIASES, resolve_dtype, resolve_kv_cache_dtype, resolve_quantize
from quire.settings.machine import num_processors

MAX_RESERVED = 0.94  # of a GPU's memory, that JAX takes at most: programs and the driver have the rest


@dataclass(frozen=True)
class Facts:
    """The facts that choices depend on: the machine, and the model's sizes."""

    platform: str  # as JAX names it
    num_devices: int
    memory_bytes: int  # of one device, or of the host where that is the device
    max_positions: int
    weight_bytes: int  # on one device
    fast_int8: bool = False  # whether its CPU multiplies int8 by instructions made for it
    quantization: str | None = None  # that of the checkpoint, in words
    cache_dtype: str | None = None  # that its keys and values are cached in; None: it does not say
    fp8_refusal: str | None = None  # why the device has no fp8; None: it has
    widened_weight_bytes: int = 0  # of the largest weight that a product widens
    reserved_fraction: float = MAX_RESERVED  # of a GPU's memory, that JAX has taken: memory_bytes
    outside_bytes: int = 0  # of a GPU, that are not JAX's
    host_bytes: int = 0  # of the host's memory, the share of one engine
    pins_memory: bool = False  # whether pages of the host are in memory that the device reads by itself
    is_native: bool = False  # whether all products and norms are those of the native library


@dataclass(frozen=True)
class Resolved:
    """Settings with every choice made."""

    dtype: str
    quantize: str
    kv_cache_dtype: str
    page_size: int
    max_batch_size: int
    max_batch_prefill_tokens: int
    max_total_tokens: int
    memory_limit_bytes: int
    min_tokens: int
    max_burst: int
    speculate: int
    fixed_tokens: float
    waiting_served_ratio: float
    max_waiting_tokens: int
    compile_threads: int
    compile_processes: int
    max_queued: int | None  # None: no limit
    max_step_ms: float  # 0: no limit
    max_burst_ms: float
    fixed_order: bool  # numbers of a row are added in one order in every step, which takes other kernels
    choices: tuple[Choice[Any], ...]  # for the log

    @property
    def page_dtype(self) -> str:
        """Of keys and values, as JAX names it."""
        return {"fp8_e4m3": "float8_e4m3fn", "int8": "int8"}.get(self.kv_cache_dtype, self.dtype)

    @property
    def num_slots(self) -> int:
        """Of the executor, which has programs for no fewer rows in a fixed order."""
        return max(self.max_batch_size, self.min_tokens) if self.fixed_order else self.max_batch_size


@dataclass(frozen=True)
class PlatformDefaults:
    max_batch_size: int
    max_batch_prefill_tokens: int
    filled: float  # share of the memory that weights, steps and pages may fill; on a GPU, of what JAX has taken
    min_tokens: int
    page_size: int
    max_burst: int
    max_step_ms: float
    fixed_tokens: float  # that take as long as a step of any number does; measured once steps run


DEFAULTS = {
    # A decode of a small model takes 50 to 200 ms, and 512 prompt tokens take seconds.
    "cpu": PlatformDefaults(32, 512, 0.5, 1, 16, 1, 500.0, 12.0),
    # Prompts are padded to eight tokens, so that there are fewer programs; a decode that is alone has one of its own.
    # Larger pages mean less work for the host, which has little time during a step of hundreds of rows.
    # To start a program takes the host a millisecond, as long as a decode of a small model.
    # An 8B model decodes in 5 to 8 ms on an H200, and computes 700 prompt tokens in the rest of 24 ms.
    "gpu": PlatformDefaults(256, 8192, 0.95, 8, 32, 4, 24.0, 256.0),
    "tpu": PlatformDefaults(128, 2048, 0.9, 8, 16, 1, 25.0, 256.0),
}
DEFAULT_MAX_TOTAL_TOKENS = {"cpu": 4096, "gpu": 32768, "tpu": 32768}
# As in text-generation-inference: each is what goes with the other where only that is given.
WAITING_SERVED_RATIO, MAX_WAITING_TOKENS = 0.3, 20
QUEUED_BATCHES, MIN_QUEUED = 16, 4096  # sequences
SERVED_BURST_MS, OFFLINE_BURST_MS = 10.0, 50.0
# On one device. A GPU reads the first in 2 ms and the second in 3, in which the host can start a step.
SMALL_MODEL_BYTES, MIDDLE_MODEL_BYTES = 8 * 2**30, 12 * 2**30
OFFLINE_BURST = 2  # of a model between them: more gain nothing
# Of a GPU's memory that is not JAX's: for the engine's programs and its driver, and for a process that compiles.
ENGINE_BYTES, PROCESS_BYTES = 2048 * 2**20, 768 * 2**20
MAX_PROCESSES = 4
THREADS_OF_ONE = 4  # a process traces one program at a time, and compiles several
# Rows that every step of a reproducible engine on a GPU is padded to.
LEAST_ROWS = 8  # of every product: the library's gave a row the same bits from there on, where they were compared
LEAST_ROWS_OF_CODES = 64  # up to half of that, codes of eight bits are widened in place of rounding the rows
LEAST_ROWS_OF_CHECKPOINTS = 128  # that are quantised: up to half of that, codes of four bits have a kernel


def resolve(config: Config, facts: Facts, is_served: bool = False) -> Resolved:
    """Decide what `config` leaves open, for this machine and model. `is_served`: to clients that wait for tokens."""
    refuse_out_of_range(config)
    platform = PLATFORM_ALIASES.get(facts.platform, facts.platform)
    defaults = DEFAULTS.get(platform, DEFAULTS["cpu"])
    if config.tensor_parallel > facts.num_devices:
        raise InvalidSetting(f"tensor_parallel is {config.tensor_parallel}; there are {facts.num_devices} devices")

    def choose(name: str, value: Any, reason: str = f"{platform.upper()} default") -> Choice[Any]:
        return chosen(name, getattr(config, name), value, reason)

    share = facts.reserved_fraction if platform == "gpu" else defaults.filled
    fraction = choose("memory_fraction", share)
    if not 0 < fraction.value <= 1:
        raise InvalidSetting(f"memory_fraction is {fraction.value}; it must be above 0 and at most 1")
    dtype, page_size = resolve_dtype(facts.platform, config.dtype), choose("page_size", defaults.page_size)
    choices = [
        dtype,
        resolve_kv_cache_dtype(
            facts.platform, config.kv_cache_dtype, dtype.value, facts.fp8_refusal, facts.cache_dtype
        ),
        resolve_quantize(facts.platform, config, facts.fast_int8, facts.quantization),
        page_size,
        choose("max_batch_size", defaults.max_batch_size),
        choose(
            "max_batch_prefill_tokens",
            defaults.max_batch_prefill_tokens,
            f"{platform.upper()} default: tokens that one step can compute while others wait for theirs",
        ),
        choose("max_total_tokens", *_max_total_tokens(config, platform, facts.max_positions)),
        fraction,
        resolve_max_burst(config, platform, defaults.max_burst, page_size.value, facts.weight_bytes, is_served),
        choose("compile_threads", min(num_processors(), 16), "one for each core, up to 16"),
    ]
    choices.append(resolve_compile_processes(config, platform, choices[-1].value, facts.outside_bytes))
    if config.waiting_served_ratio or config.max_waiting_tokens:
        reason = "as in text-generation-inference, where only {} is given"
        choices += [
            choose("waiting_served_ratio", WAITING_SERVED_RATIO, reason.format("max_waiting_tokens")),
            choose("max_waiting_tokens", MAX_WAITING_TOKENS, reason.format("waiting_served_ratio")),
        ]
    if config.speculate:
        choices.append(_speculate(config, page_size.value))
    if config.reproducible:
        choices.append(_reproducible(platform))
    values: dict[str, Any] = {"waiting_served_ratio": 0.0, "max_waiting_tokens": 0, "speculate": 0}
    values |= {choice.name: choice.value for choice in choices if choice.name not in ("reproducible", fraction.name)}
    if is_served:
        bounds: list[Choice[Any]] = [
            resolve_max_queued(config, values["max_batch_size"]),
            resolve_max_step_ms(config, platform),
        ]
        reason = "so much later a new request may begin, and so far apart tokens may come"
        bounds.append(choose("max_burst_ms", SERVED_BURST_MS, reason))
        values |= {choice.name: choice.value for choice in bounds}
        choices += bounds if values["max_burst"] > 1 else bounds[:-1]
    else:  # only the total time counts
        burst_ms = OFFLINE_BURST_MS if config.max_burst_ms is None else config.max_burst_ms
        values |= {"max_queued": config.max_queued, "max_step_ms": config.max_step_ms or 0.0, "max_burst_ms": burst_ms}
    fixed_order = config.reproducible and platform == "gpu"
    return Resolved(
        **values,
        memory_limit_bytes=_memory_limit_bytes(fraction.value, platform, facts),
        min_tokens=_least_rows(values["quantize"], facts.quantization) if fixed_order else defaults.min_tokens,
        fixed_tokens=defaults.fixed_tokens,
        fixed_order=fixed_order,
        choices=tuple(choices),
    )


def _memory_limit_bytes(fraction: float, platform: str, facts: Facts) -> int:
    """The memory that weights, steps, pages and slots may fill."""
    if platform != "gpu":
        return int(fraction * facts.memory_bytes)
    return int(DEFAULTS["gpu"].filled * min(1, fraction / facts.reserved_fraction) * facts.memory_bytes)


def _max_total_tokens(config: Config, platform: str, max_positions: int) -> tuple[int, str]:
    """The default and its reason. Raises where what is asked for is more than there can be."""
    asked, together = config.max_total_tokens or 0, config.max_batch_total_tokens or sys.maxsize
    if asked > max_positions:
        raise InvalidSetting(f"max_total_tokens is {asked}; the model has {max_positions} positions")
    if asked > together:
        raise InvalidSetting(f"max_total_tokens is {asked}; it must be at most max_batch_total_tokens, {together}")
    limit = min(max_positions, DEFAULT_MAX_TOTAL_TOKENS.get(platform, 4096))
    if together < limit:
        return together, "max_batch_total_tokens: one sequence has no more"
    if limit == max_positions:
        return limit, "all positions of the model"
    default = f"{platform.upper()} default"
    return limit, f"{default}; the model allows {max_positions}: --max-total-tokens {max_positions}"


def resolve_max_queued(config: Config, max_batch_size: int) -> Choice[int]:
    """The most sequences that wait in a server. Offline there is no bound."""
    several = QUEUED_BATCHES * max_batch_size
    reason = f"{QUEUED_BATCHES} batches; clients further back would have given up before their turn"
    if several < MIN_QUEUED:
        several, reason = MIN_QUEUED, "twice what one HTTP worker lets in by default"
    return chosen("max_queued", config.max_queued, several, reason)


def resolve_max_step_ms(config: Config, platform: str) -> Choice[float]:
    """The longest step of a server while sequences decode. Offline there is no limit: only the total time counts."""
    platform = PLATFORM_ALIASES.get(platform, platform)
    default = DEFAULTS.get(platform, DEFAULTS["cpu"]).max_step_ms
    reason = f"{platform.upper()} default: prompts are cut so that others' tokens keep coming; 0 sets no limit"
    return chosen("max_step_ms", config.max_step_ms, default, reason)


def _speculate(config: Config, page_size: int) -> Choice[int]:
    if config.speculate >= page_size:
        raise InvalidSetting(f"speculate is {config.speculate}; it must be less than page_size, {page_size}")
    return Choice("speculate", config.speculate, ASKED_FOR)


def resolve_max_burst(
    config: Config, platform: str, default: int, page_size: int, weight_bytes: int, is_served: bool
) -> Choice[int]:
    """The most tokens that a step gives each sequence. `default`: of the platform, for small models."""
    if config.max_burst is not None and config.max_burst > page_size:
        raise InvalidSetting(f"max_burst is {config.max_burst}; it can be as many as page_size, {page_size}")
    most, reason = min(default, page_size), f"{platform.upper()} default"
    if config.reproducible and platform == "gpu":
        most, reason = 1, "reproducible: tokens of a burst have a program of their own"
    elif most > 1 and weight_bytes > SMALL_MODEL_BYTES:
        if is_served or weight_bytes > MIDDLE_MODEL_BYTES:
            most, reason = 1, "a step of so large a model takes longer than to start it"
        else:
            most, reason = min(OFFLINE_BURST, page_size), "offline: to start a step takes nearly as long as the step"
    return chosen("max_burst", config.max_burst, most, reason)


def resolve_compile_processes(config: Config, platform: str, threads: int, outside_bytes: int) -> Choice[int]:
    """Processes that compile programs for the engine. `outside_bytes`: of a GPU, that are not JAX's."""
    name, asked = "compile_processes", config.compile_processes
    if config.tensor_parallel > 1:
        return chosen(name, asked, 0, "several devices: threads compile")
    if platform != "gpu":
        count = int(platform == "cpu" and threads > 1)
        reason = "one, of a low priority, while an engine serves" if count else "threads compile"
        return chosen(name, asked, count, f"{platform.upper()} default: {reason}")
    fitting = max(0, outside_bytes - ENGINE_BYTES) // PROCESS_BYTES
    reason = f"one for {THREADS_OF_ONE} compile_threads; {outside_bytes / 2**30:.1f} GiB of the GPU are not JAX's"
    return chosen(name, asked, min(max(1, threads // THREADS_OF_ONE), MAX_PROCESSES, fitting), reason)


def _reproducible(platform: str) -> Choice[bool]:
    reason = "nothing changes: on this CPU no row depends on others in any case"
    if platform == "gpu":
        reason = "one order of sums in every step, by other kernels, and a check of every program"
    return Choice("reproducible", True, reason)


def _least_rows(quantize: str, quantization: str | None) -> int:
    """`quantization`: that of the checkpoint."""
    if quantization:
        return LEAST_ROWS_OF_CHECKPOINTS
    return LEAST_ROWS if quantize == "none" else LEAST_ROWS_OF_CODES
