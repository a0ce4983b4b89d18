"""Quantised checkpoints through the whole engine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.building.plan import plan_deployment
from quire.errors import InvalidSetting
from quire.models.registry import build_model
from quire.ops.native import library
from quire.settings.config import Config
from tests.models.adapter_files import write_adapter
from tests.models.quantized_checkpoints import FORMATS, write_checkpoint, write_plain
from tests.tiny_chat_model import CONFIG, SIZES, byte_tokenizer, program_folder

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ["hello", "the quick brown fox jumps over it", "a", "hello hello hello"]


ROUNDED = ("ct-int8", "ct-nvfp4", "fbgemm-fp8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints in gptq and nvfp4, the same in float32, some that round activations, and an adapter for all."""
    folder = tmp_path_factory.mktemp("quantized")
    coded = write_checkpoint(folder / "gptq", CONFIG, FORMATS["gptq-4-act-order"])
    write_plain(folder / "plain", CONFIG, coded.wide)
    four_bit_floats = write_checkpoint(folder / "nvfp4", CONFIG, FORMATS["modelopt-nvfp4-weights"])
    write_plain(folder / "plain of nvfp4", CONFIG, four_bit_floats.wide)
    for name in ROUNDED:
        write_checkpoint(folder / name, CONFIG, FORMATS[name])
    for name in ("gptq", "plain", "nvfp4", "plain of nvfp4", *ROUNDED):
        byte_tokenizer().save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    write_adapter(folder / "adapter", build_model(CONFIG), seed=0, alpha=16, rank=2)
    return folder


@contextmanager
def running(path: Path, factory: pytest.TempPathFactory, **settings: Any) -> Iterator[LLM]:
    cache = program_folder(factory)
    llm = LLM(str(path), progress=False, cache_dir=cache, compile_ahead=False, **SIZES, **settings)
    yield llm
    llm.close()


@pytest.mark.parametrize(("coded", "plain"), [("gptq", "plain"), ("nvfp4", "plain of nvfp4")])
def test_tokens_are_those_of_the_widened_model_with_and_without_an_adapter(
    coded: str, plain: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = {}
    for name in (coded, plain):
        adapters = {"one": folder / "adapter"}
        with running(folder / name, tmp_path_factory, adapters=adapters, dtype="float32", quantize="none") as llm:
            found[name] = [
                one.token_ids
                for adapter in (None, "one")
                for one in llm.generate(PROMPTS, GREEDY, max_tokens=12, ignore_end=True, adapter=adapter)
            ]
    assert found[coded] == found[plain]
    assert found[coded][: len(PROMPTS)] != found[coded][len(PROMPTS) :], "the adapter changes nothing"


@pytest.mark.skipif(not library.load(), reason="rows are alike by the native library")
def test_fp8_made_at_load_answers_alike_in_any_batch_and_under_an_adapter(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    how: Any = {"sampling": GREEDY, "max_tokens": 12, "ignore_end": True}
    adapters = {"one": folder / "adapter"}
    with running(folder / "plain", tmp_path_factory, adapters=adapters, quantize="fp8") as llm:
        together = [one.token_ids for one in llm.generate(PROMPTS, **how)]
        assert [llm.generate(prompt, **how)[0].token_ids for prompt in PROMPTS] == together
        adapted = [one.token_ids for one in llm.generate(PROMPTS, adapter="one", **how)]
    assert adapted != together, "the adapter changes nothing"
    deployments = [
        plan_deployment(Config(model=str(folder / "plain"), quantize=kind, **SIZES)) for kind in ("fp8", "none")
    ]
    eight, plain = (one.facts.weight_bytes for one in deployments)
    assert eight < 0.75 * plain  # the embedding is most of it, and stays in float32
    assert deployments[0].facts.widened_weight_bytes == 0


@pytest.mark.skipif(not library.load(), reason="rows are alike by the native library")
@pytest.mark.parametrize("name", ROUNDED)
def test_an_answer_does_not_depend_on_the_others_in_its_batch(
    name: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running(folder / name, tmp_path_factory, prefix_caching=False) as llm:
        how: Any = {"sampling": SamplingParams(temperature=1.0), "max_tokens": 12, "ignore_end": True, "seed": 3}
        together = llm.generate(PROMPTS, **how)
        for prompt, one in zip(PROMPTS, together, strict=True):
            assert llm.generate(prompt, **how)[0].token_ids == one.token_ids


def test_a_deployment_knows_what_a_checkpoint_costs_and_why(folder: Path) -> None:
    sizes = {}
    for name in ("gptq", "plain"):
        deployment = plan_deployment(Config(model=str(folder / name), quantize="none", **SIZES))
        sizes[name] = deployment.facts.weight_bytes
    assert sizes["gptq"] < 0.75 * sizes["plain"]  # the embedding is most of it, and stays in float32
    auto = plan_deployment(Config(model=str(folder / "gptq"), **SIZES))
    (choice,) = [choice for choice in auto.choices if choice.name == "quantize"]
    assert choice.value == "none"
    assert choice.reason.startswith("as the checkpoint is: gptq, 4 bits in groups of 16")
    plain = plan_deployment(Config(model=str(folder / "gptq"), dtype="bfloat16", **SIZES))
    assert plain.facts.widened_weight_bytes == 64 * 2 * 32 * 4  # gate and up
    assert auto.facts.widened_weight_bytes == (0 if library.load() else plain.facts.widened_weight_bytes)


@pytest.mark.skipif(not library.load(), reason="there is no native library")
def test_a_deployment_has_room_for_copies_where_the_part_for_codes_cannot_be_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_failed", {"codes"})
    deployment = plan_deployment(Config(model=str(folder / "gptq"), **SIZES))
    assert deployment.facts.widened_weight_bytes == 64 * 2 * 32 * 4  # gate and up


def test_the_checkpoint_s_own_method_can_be_asked_for_and_no_other(folder: Path) -> None:
    asked = plan_deployment(Config(model=str(folder / "gptq"), quantize="gptq", **SIZES))
    assert asked.resolved.quantize == "none"
    with pytest.raises(InvalidSetting, match="quantize is 'awq'; the checkpoint is gptq, 4 bits"):
        plan_deployment(Config(model=str(folder / "gptq"), quantize="awq", **SIZES))
    with pytest.raises(InvalidSetting, match="quantize is 'gptq'; the checkpoint is not quantised"):
        plan_deployment(Config(model=str(folder / "plain"), quantize="gptq", **SIZES))
