"""Decides the types of weights and activations, of matrices, and of keys and values in the cache."""

from quire.errors import InvalidSetting
from quire.settings.choice import ASKED_FOR, Choice
from quire.settings.config import Config

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZE = ("none", "int8", "fp8")
METHODS = (  # of checkpoints
    "compressed-tensors", "fp8", "gptq", "awq", "mxfp4", "modelopt", "fbgemm_fp8", "auto-round",
)  # fmt: skip
# Names that other servers have for the method of a checkpoint, and the method.
OTHER_NAMES = {("fp8", "fbgemm_fp8"), ("modelopt_fp4", "modelopt"), ("intel/auto-round", "auto-round")}

# A reason of float32 on CPUs, also in groups, which have a device for each member.
SEVERAL_DEVICES = "the int8 kernels of CPUs are for one device, and the model is cut across several"

# Platforms as JAX names them.
_DTYPE_BY_PLATFORM = {
    "cpu": ("float32", "CPUs without bfloat16 units would convert at every step"),
    "gpu": ("bfloat16", "half the memory traffic of float32, at full matmul speed"),
    "tpu": ("bfloat16", "what its matrix units compute in"),
}
PLATFORM_ALIASES = {"cuda": "gpu", "rocm": "gpu"}

# Names of kv_cache_dtype, those of text-generation-inference and vLLM among them.
CACHE_DTYPES = {"fp8_e4m3": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3", "fp8": "fp8_e4m3", "int8": "int8"}
_PLATFORMS = ("cpu", "gpu", "cuda", "rocm")  # with kernels for a cache of eight bits


def resolve_dtype(platform: str, asked: str | None) -> Choice[str]:
    """The dtype of weights and activations."""
    if asked is not None and asked != "auto":
        if asked not in DTYPES:
            raise InvalidSetting(f"dtype is {asked!r}; it can be {', '.join(DTYPES)} or auto")
        return Choice("dtype", asked, ASKED_FOR)
    kind = PLATFORM_ALIASES.get(platform, platform)
    if kind not in _DTYPE_BY_PLATFORM:
        known = ", ".join((*_DTYPE_BY_PLATFORM, *PLATFORM_ALIASES))
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
        if asked != "none" and PLATFORM_ALIASES.get(platform, platform) not in ("cpu", "gpu"):
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


def resolve_kv_cache_dtype(
    platform: str, asked: str | None, dtype: str, fp8_refusal: str | None = None, stored: str | None = None
) -> Choice[str]:
    """The type of keys and values in pages: fp8_e4m3, int8, `dtype`, or auto, which is `dtype` as well.

    `fp8_refusal`: why the device has no fp8; None: it has. `stored`: the type that the checkpoint asks for. A decision
    against that is `dtype` by its name, so that it is the same wherever it is read again.
    """
    if asked is None or asked == "auto":
        return _automatic(platform, dtype, fp8_refusal, stored)
    if asked == dtype:
        return Choice("kv_cache_dtype", dtype, ASKED_FOR)
    if asked not in CACHE_DTYPES:
        e5m2 = ": two bits of fraction are too few for keys" if asked == "fp8_e5m2" else ""
        raise InvalidSetting(f"kv_cache_dtype is {asked!r}{e5m2}; it can be fp8_e4m3, int8, {dtype} or auto")
    if platform not in _PLATFORMS:
        raise InvalidSetting(f"kv_cache_dtype = {asked} is for CPUs and GPUs; on a {platform} it can be auto")
    if CACHE_DTYPES[asked] == "fp8_e4m3" and fp8_refusal is not None:
        raise InvalidSetting(f"kv_cache_dtype = {asked} {fp8_refusal}: it can be int8 or auto")
    return Choice("kv_cache_dtype", CACHE_DTYPES[asked], ASKED_FOR)


def _automatic(platform: str, dtype: str, fp8_refusal: str | None, stored: str | None) -> Choice[str]:
    if stored is None:
        return Choice("kv_cache_dtype", "auto", f"that of activations, {dtype}")
    if platform not in _PLATFORMS:
        return Choice("kv_cache_dtype", dtype, f"{stored}, which the checkpoint asks for, is for CPUs and GPUs")
    if stored == "fp8_e4m3" and fp8_refusal is not None:
        return Choice("kv_cache_dtype", dtype, f"{stored}, which the checkpoint asks for, {fp8_refusal}")
    reason = "the checkpoint's kv_cache_scheme; each token and head has a scale of its own, so its scales are not used"
    return Choice("kv_cache_dtype", stored, f"{reason}; {dtype} is more exact")
