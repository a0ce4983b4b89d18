"""GGUF files through the whole engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from quire import LLM, SamplingParams
from quire.models.registry import build_model
from tests.models.gguf_conversion import write_as_gguf
from tests.models.tiny import NamedTensors
from tests.tiny_chat_model import CONFIG, SIZES, byte_tokenizer, program_folder

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[1, 2, 3], [7] * 20, [9, 8, 7, 6, 5, 4]]
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_model_with_experts_gives_the_tokens_of_its_safetensors(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, quantize: str
) -> None:
    config = CONFIG | EXPERTS
    tensors = NamedTensors(build_model(config))
    arrays = {name: tensors.read(name) for name in tensors.tensors()}
    write_as_gguf(tmp_path / "m.gguf", config, arrays)
    (tmp_path / "folder").mkdir()
    save_file(arrays, tmp_path / "folder" / "model.safetensors")
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(tmp_path / "folder" / "tokenizer.json"))
    found = []
    for path in ("m.gguf", "folder"):
        cache: Any = {"cache_dir": program_folder(tmp_path_factory), "compile_ahead": False, "progress": False}
        llm = LLM(str(tmp_path / path), dtype="float32", quantize=quantize, **cache, **SIZES)
        answers = llm.generate(PROMPTS, GREEDY, max_tokens=12, ignore_end=True)
        found.append([answer.token_ids for answer in answers])
        llm.close()
    assert found[0] == found[1]
    assert len({token for tokens in found[0] for token in tokens}) > 3
