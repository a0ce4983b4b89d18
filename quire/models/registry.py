"""Which families there are, and what no family supports."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quire.errors import UnsupportedModel
from quire.models.decoder import Decoder
from quire.models.fields import Fields
from quire.models.llama import llama


class Family(NamedTuple):
    build: Callable[[Fields], Decoder]
    architectures: tuple[str, ...]


# By `model_type`.
FAMILIES: dict[str, Family] = {
    "llama": Family(llama, ("LlamaForCausalLM",)),
}


def build_model(config: Mapping[str, Any]) -> Decoder:
    """The model of a Hugging Face config; `UnsupportedModel` where the config alone shows that Quire cannot run it."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModel(f"model_type = {model_type!r} is not supported: known are {', '.join(sorted(FAMILIES))}")
    fields = Fields(config, str(model_type))
    architectures = config.get("architectures") or []
    if architectures and not set(architectures) & set(family.architectures):
        raise fields.unsupported("architectures", f"this family has {', '.join(family.architectures)}")
    for name in ("quantization_config", "compression_config"):
        if fields.get(name):
            raise fields.unsupported(name, "weights are loaded as float32, float16 or bfloat16")
    for name in ("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"):
        fields.only(name, False)
    return family.build(fields)
