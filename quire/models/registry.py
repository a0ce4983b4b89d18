"""The table of families, and the options that none supports."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quire.errors import UnsupportedModel, shown
from quire.models.families.cohere2 import cohere2
from quire.models.families.deepseek import deepseek_v2, deepseek_v3
from quire.models.families.exaone4 import exaone4
from quire.models.families.gemma2 import gemma2
from quire.models.families.gemma3 import gemma3
from quire.models.families.glm4 import glm4
from quire.models.families.glm4_moe import glm4_moe
from quire.models.families.gpt2 import gpt2
from quire.models.families.gpt_oss import gpt_oss
from quire.models.families.granite import granite
from quire.models.families.granitemoehybrid import granitemoehybrid
from quire.models.families.llama import llama
from quire.models.families.llama4 import llama4
from quire.models.families.mistral import mistral
from quire.models.families.mixtral import mixtral
from quire.models.families.olmo2 import olmo2, olmo3
from quire.models.families.phi3 import phi3
from quire.models.families.qwen2 import qwen2
from quire.models.families.qwen3 import qwen3
from quire.models.families.qwen3_moe import qwen3_moe
from quire.models.families.qwen3_next import qwen3_next
from quire.models.families.smollm3 import smollm3
from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder


class Family(NamedTuple):
    build: Callable[[Fields], Decoder]
    architectures: tuple[str, ...]


# By `model_type`.
FAMILIES: dict[str, Family] = {
    "llama": Family(llama, ("LlamaForCausalLM",)),
    "llama4": Family(llama4, ("Llama4ForConditionalGeneration",)),
    "llama4_text": Family(llama4, ("Llama4ForCausalLM",)),
    "qwen2": Family(qwen2, ("Qwen2ForCausalLM",)),
    "qwen3": Family(qwen3, ("Qwen3ForCausalLM",)),
    "mistral": Family(mistral, ("MistralForCausalLM",)),
    "gemma2": Family(gemma2, ("Gemma2ForCausalLM",)),
    "gemma3": Family(gemma3, ("Gemma3ForConditionalGeneration",)),
    "gemma3_text": Family(gemma3, ("Gemma3ForCausalLM",)),
    "phi3": Family(phi3, ("Phi3ForCausalLM",)),
    "granite": Family(granite, ("GraniteForCausalLM",)),
    "olmo2": Family(olmo2, ("Olmo2ForCausalLM",)),
    "olmo3": Family(olmo3, ("Olmo3ForCausalLM",)),
    "glm4": Family(glm4, ("Glm4ForCausalLM",)),
    "glm4_moe": Family(glm4_moe, ("Glm4MoeForCausalLM",)),
    "cohere2": Family(cohere2, ("Cohere2ForCausalLM",)),
    "exaone4": Family(exaone4, ("Exaone4ForCausalLM",)),
    "smollm3": Family(smollm3, ("SmolLM3ForCausalLM",)),
    "deepseek_v2": Family(deepseek_v2, ("DeepseekV2ForCausalLM",)),
    "deepseek_v3": Family(deepseek_v3, ("DeepseekV3ForCausalLM",)),
    "gpt_oss": Family(gpt_oss, ("GptOssForCausalLM",)),
    "gpt2": Family(gpt2, ("GPT2LMHeadModel",)),
    "mixtral": Family(mixtral, ("MixtralForCausalLM",)),
    "qwen3_moe": Family(qwen3_moe, ("Qwen3MoeForCausalLM",)),
    "qwen3_next": Family(qwen3_next, ("Qwen3NextForCausalLM",)),
    "granitemoehybrid": Family(granitemoehybrid, ("GraniteMoeHybridForCausalLM",)),
}


def build_model(config: Mapping[str, Any]) -> Decoder:
    """The model of a Hugging Face config; `UnsupportedModel` if the config shows that Quire cannot run it."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModel(
            f"model_type = {shown(model_type)} is not supported: known are {', '.join(sorted(FAMILIES))}"
        )
    fields = Fields(config, str(model_type))
    architectures = config.get("architectures") or []
    if architectures and not (
        isinstance(architectures, list) and any(name in family.architectures for name in architectures)
    ):
        raise fields.unsupported("architectures", f"this family has {', '.join(family.architectures)}")
    _refuse_options(fields)
    if "text_config" in fields:  # a model with more than text, of which Quire runs the text
        fields = fields.within("text_config", defaults={"tie_word_embeddings": fields.get("tie_word_embeddings")})
        _refuse_options(fields)
    return family.build(fields)


def _refuse_options(fields: Fields) -> None:
    """Raise for options that no family supports."""
    if fields.get("compression_config"):
        raise fields.unsupported("compression_config", "quantised checkpoints have a quantization_config")
    for name in ("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention"):
        fields.only(name, False)
    fields.only("is_causal", True)
