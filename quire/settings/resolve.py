"""Decides the settings that were left open, and logs each choice with its reason."""

import sys
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidSetting
from quire.settings.bursts import resolve_max_burst
from quire.settings.cache_dtype import resolve_kv_cache_dtype
from quire.settings.choice import ASKED_FOR, Choice, chosen
from quire.settings.compiling import resolve_compile_processes
from quire.settings.config import Config
from quire.settings.machine import num_processors
from quire.settings.ranges import refuse_out_of_range
from quire.settings.reproducible import least_rows, resolve_reproducible

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZE = ("none", "int8", "fp8")
METHODS = (  # of checkpoints
    "compressed-tensors", "fp8", "gptq", "awq", "mxfp4", "modelopt", "fbgemm_fp8", "auto-round",
)  # fmt: skip
# Names that other servers have for the method of a checkpoint, and the method.
OTHER_NAMES = {("fp8", "fbgemm_fp8"), ("modelopt_fp4", "modelopt"), ("intel/auto-round", "auto-round")}


MAX_RESERVED = 0.94  # of a GPU's memory, that JAX takes at most: programs and the driver have the rest

# A reason of float32 on CPUs, also in groups, which have a device for each member.
SEVERAL_DEVICES = "the int8 kernels of CPUs are for one device, and the model is cut across several"

# Platforms as JAX names them.
_DTYPE_BY_PLATFORM = {
    "cpu": ("float32", "CPUs without bfloat16 units would convert at every step"),
    "gpu": ("bfloat16", "half the memory traffic of float32, at full matmul speed"),
    "tpu": ("bfloat16", "what its matrix units compute in"),
}
_PLATFORM_ALIASES = {"cuda": "gpu", "rocm": "gpu"}


def resolve_dtype(platform: str, asked: str | None) -> Choice[str]:
    """The dtype of weights and activations."""
    if asked is not None and asked != "auto":
        if asked not in DTYPES:
            raise InvalidSetting(f"dtype is {asked!r}; it can be {', '.join(DTYPES)} or auto")
        return Choice("dtype", asked, ASKED_FOR)
    kind = _PLATFORM_ALIASES.get(platform, platform)
    if kind not in _DTYPE_BY_PLATFORM:
        known = ", ".join((*_DTYPE_BY_PLATFORM, *_PLATFORM_ALIASES))
        raise InvalidSetting(f"no dtype is known to suit platform {platform!r} ({known} are); set --dtype")
    value, reason = _DTYPE_BY_PLATFORM[kind]
    return Choice("dtype", value, f"{platform}: {reason}")


def resolve_quantize(platform: str, config: Config, fast_int8: bool, quantization: str | None = None) -> Choice[str]:
    """The type in which matrices are stored and multiplied; "none": `dtype`, or as in a quantised checkpoint."""
    asked = config.quantize
    if asked in (*METHODS, *(name for name, _ in OTHER_NAMES)) and (asked != "fp8" or quantization is not None):
        method = None if quantization is None else quantization.partition(",")[0]
        if method != asked and (asked, method) not in OTHER_NAMES:
            is_what = "not quantised" if quantization is None else quantization
            raise InvalidSetting(f"quantize is {asked!r}; the checkpoint is {is_what}")
        return Choice("quantize", "none", f"as the checkpoint is: {quantization}")
    if asked is not None and asked != "auto":
        if asked not in QUANTIZE:
            raise InvalidSetting(f"quantize is {asked!r}; it can be {', '.join(QUANTIZE)} or auto")
        if asked != "none" and _PLATFORM_ALIASES.get(platform, platform) not in ("cpu", "gpu"):
            raise InvalidSetting(f"quantize = {asked} is for CPUs and GPUs; on a {platform} it can be none")
        if asked == "fp8" and platform == "cpu":
            return Choice("quantize", asked, f"{ASKED_FOR}; a CPU widens it inside products: int8 is faster")
        return Choice("quantize", asked, ASKED_FOR)
    if quantization is not None:
        faster = "; int8 rounds them again, which is faster on this CPU" if platform == "cpu" and fast_int8 else ""
        return Choice("quantize", "none", f"as the checkpoint is: {quantization}{faster}")
    if platform != "cpu" or not fast_int8:
        return Choice("quantize", "none", "as exact as the weights are")
    if config.dtype is not None or config.tensor_parallel > 1:
        reason = "dtype is asked for" if config.dtype is not None else SEVERAL_DEVICES
        return Choice("quantize", "none", f"{reason}; without it int8, which is faster on this CPU")
    return Choice("quantize", "int8", "faster on this CPU, and as close to float32 as Q8_0 files; none: float32")


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

    def is_automatic(self, name: str) -> bool:
        """True if this setting was not asked for."""
        return next(choice.is_automatic for choice in self.choices if choice.name == name)


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
RESERVE_BYTES = 256 * 2**20  # for fragments, programs and small arrays
# For pages on their way between a GPU and the host: those of two fetches, a copy of one, and those that are saved.
MOVING_BYTES = 3328 * 2**20
MAX_ARRAY_NUMBERS = 2**31 - 1  # whose places the kernels of a GPU count in 32 bits
MAX_HOST_CACHE_BYTES = 2 * 2**30
QUEUED_BATCHES, MIN_QUEUED = 16, 4096  # sequences
PAGE_STEP = 64  # the number of pages is a multiple of this, so that compiled programs are found again


def resolve(config: Config, facts: Facts, is_served: bool = False) -> Resolved:
    """Decide what `config` leaves open, for this machine and model. `is_served`: to clients that wait for tokens."""
    refuse_out_of_range(config)
    platform = _PLATFORM_ALIASES.get(facts.platform, facts.platform)
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
        choices.append(resolve_reproducible(config, platform, facts.is_native))
    fixed_order = config.reproducible and platform == "gpu"
    unless_asked = {"waiting_served_ratio": 0.0, "max_waiting_tokens": 0, "speculate": 0}
    values = unless_asked | {choice.name: choice.value for choice in choices if choice.name != "reproducible"}
    del values["memory_fraction"]
    return Resolved(
        **values,
        memory_limit_bytes=_memory_limit_bytes(fraction.value, platform, facts),
        min_tokens=least_rows(choices[2].value, facts.quantization) if fixed_order else defaults.min_tokens,
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
    platform = _PLATFORM_ALIASES.get(platform, platform)
    default = DEFAULTS.get(platform, DEFAULTS["cpu"]).max_step_ms
    reason = f"{platform.upper()} default: prompts are cut so that others' tokens keep coming; 0 sets no limit"
    return chosen("max_step_ms", config.max_step_ms, default, reason)


def _speculate(config: Config, page_size: int) -> Choice[int]:
    if config.speculate >= page_size:
        raise InvalidSetting(f"speculate is {config.speculate}; it must be less than page_size, {page_size}")
    return Choice("speculate", config.speculate, ASKED_FOR)


def resolve_pages(
    config: Config,
    resolved: Resolved,
    facts: Facts,
    step_bytes: int,
    page_bytes: int,
    longest: int,
    state_bytes: int = 0,
    page_numbers: int = 0,
) -> Choice[int]:
    """The number of pages: they fill the memory besides weights, the largest step and a reserve.

    `longest` is the number of pages that a sequence of max_total_tokens has at once. `state_bytes`: of all slots,
    which is not in pages. `page_numbers`: those of one page in the largest array of a device.
    """
    reserve = RESERVE_BYTES + (MOVING_BYTES if config.host_cache_gib and facts.platform == "gpu" else 0)
    left = resolved.memory_limit_bytes - facts.weight_bytes - step_bytes - state_bytes - reserve
    state = f"{as_size(state_bytes)} state of slots - " if state_bytes else ""
    sum_line = (
        f"{as_size(resolved.memory_limit_bytes)} allowed - {as_size(facts.weight_bytes)} weights - "
        f"{as_size(step_bytes)} largest step - {state}{as_size(reserve)} reserve = {as_size(left)}, "
        f"at {as_size(page_bytes)} a page"
    )
    needed = longest + 1  # page 0 is not handed out
    most = MAX_ARRAY_NUMBERS // page_numbers if page_numbers and facts.platform == "gpu" else sys.maxsize
    if config.num_pages is not None:
        if config.num_pages > most:
            raise InvalidSetting(f"num_pages is {config.num_pages}; kernels reach {most} pages of this model")
        choice = Choice("num_pages", config.num_pages, ASKED_FOR)
    else:
        useful = longest * resolved.max_batch_size + 1
        count, reason = max(0, left) // page_bytes, sum_line
        if facts.platform == "cpu" and count * page_bytes > MAX_HOST_CACHE_BYTES:
            count = MAX_HOST_CACHE_BYTES // page_bytes
            reason = f"{as_size(MAX_HOST_CACHE_BYTES)} at {as_size(page_bytes)} a page, to leave the host its memory"
        if count > useful:
            count = min(count, -(-useful // PAGE_STEP) * PAGE_STEP)  # the rest keeps prefixes
            reason = f"room for {(rows := resolved.max_batch_size)} sequence{'s' * (rows > 1)} of max_total_tokens"
        if count > most:
            count, reason = most, f"kernels reach {most} pages of this model"
        count = rounded if (rounded := count - count % PAGE_STEP) >= needed else count
        choice = Choice("num_pages", count, reason)
    if choice.value < needed:
        raise InvalidSetting(
            f"{choice.value} pages of {resolved.page_size} tokens do not hold one sequence of max_total_tokens = "
            f"{resolved.max_total_tokens}, which needs {needed}: {sum_line}"
        )
    if choice.value * page_bytes > max(left, 0):
        raise InvalidSetting(f"num_pages = {choice.value} needs {as_size(choice.value * page_bytes)}: {sum_line}")
    return choice


def as_size(num_bytes: int) -> str:
    """A size in the largest unit of which there is at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
