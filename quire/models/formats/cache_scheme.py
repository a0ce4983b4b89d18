"""The type in which a quantised checkpoint wants its keys and values cached, and the scales that it has for them."""

from quire.models.fields import Fields
from quire.models.formats.compressed_matrix import ARGUMENTS

# One number for a layer, or one for each of its heads. Each token and head of a cache here has its own.
CACHE_SCALES = ("k_scale", "v_scale", "kv_scale")
CACHE_ZEROS = ("k_zero_point", "v_zero_point")


def read_cache_scheme(fields: Fields) -> str | None:
    """That of compressed-tensors, as `kv_cache_dtype` names it; None if it has none."""
    scheme = fields.within("kv_cache_scheme")
    if not list(scheme):
        return None
    for name in scheme:
        if name in scheme and name not in ARGUMENTS:
            raise scheme.unsupported(name, "it is unknown here")
    scheme.only("num_bits", 8)
    scheme.only("type", "float", "int")
    scheme.only("symmetric", True)
    scheme.only("strategy", "tensor", "attn_head", "token")
    scheme.only("dynamic", True, False)
    for name in ("group_size", "block_structure", "actorder"):
        if scheme.get(name):
            raise scheme.unsupported(name, "it is of weights")
    return "fp8_e4m3" if scheme.text("type", "int") == "float" else "int8"


def read_static_cache(fields: Fields) -> str | None:
    """That of `quant_method: fp8`, where the field is a word."""
    if not fields.get("kv_cache_scheme"):
        return None
    fields.only("kv_cache_scheme", "static")
    return "fp8_e4m3"
