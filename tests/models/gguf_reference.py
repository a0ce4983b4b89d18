"""A GGUF file as transformers reads it."""

from pathlib import Path
from typing import Any


def transformers_model(path: Path, config_fields: dict[str, Any] | None = None) -> Any:
    """In float32, with the file's own config or another.

    Put together from the parts that `from_pretrained` uses, which itself asks for one package more.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if config_fields is None:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    else:
        config = AutoConfig.for_model(**config_fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    report = model.load_state_dict(tensors, strict=False)
    missing = [name for name in report.missing_keys if name != "lm_head.weight" or not config.tie_word_embeddings]
    assert not missing, missing
    assert not report.unexpected_keys, report.unexpected_keys
    model.tie_weights()
    return model.eval()
