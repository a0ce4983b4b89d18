"""A model small enough to compile in a moment, whose tokens are bytes: written as a folder that Quire can read."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.files.cache_folder import cache_folder

END = "<|end|>"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}
# The same everywhere, so that each program is compiled once in a run of the tests.
SIZES: dict[str, Any] = {"max_batch_size": 2, "max_batch_prefill_tokens": 32, "page_size": 4}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, normalized=False)])
    return backend


def write_tiny_chat_model(folder: Path, *, chat: bool = True, **config: Any) -> str:
    """The folder as a model's name: its weights are random, and its answers as good as noise."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    described = {"eos_token": END} | ({"chat_template": TEMPLATE} if chat else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return f"random:{folder}"


def program_folder(factory: pytest.TempPathFactory) -> Path:
    """Where this run of the tests keeps compiled programs, for all of its workers."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny-programs"
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):  # the native library is that of the user: it takes long to build
        (folder / "native").symlink_to(cache_folder() / "native")
    return folder
