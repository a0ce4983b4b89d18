"""Decides the type of keys and values in the cache."""

from quire.errors import InvalidSetting
from quire.settings.choice import ASKED_FOR, Choice

# Names of kv_cache_dtype, those of text-generation-inference and vLLM among them.
CACHE_DTYPES = {"fp8_e4m3": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3", "fp8": "fp8_e4m3", "int8": "int8"}
_PLATFORMS = ("cpu", "gpu", "cuda", "rocm")  # with kernels for a cache of eight bits


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
