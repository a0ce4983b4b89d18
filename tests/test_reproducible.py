"""Reproducible engines on each platform, and the settings and models that do not go with them."""

from dataclasses import replace
from typing import Any

import pytest

from quire.errors import InvalidSetting
from quire.settings.config import Config
from quire.settings.reproducible import ModelKinds, refuse_kinds, resolve_reproducible
from quire.settings.resolve import Facts, Resolved, resolve

GPU = Facts(platform="gpu", num_devices=8, memory_bytes=2**37, max_positions=4096, weight_bytes=2**30)
CPU = replace(GPU, platform="cpu", is_native=True)


def resolved(facts: Facts, **settings: Any) -> Resolved:
    return resolve(Config(reproducible=True, **settings), facts)


def test_on_a_cpu_nothing_changes_and_the_log_says_so() -> None:
    found, usual = resolved(CPU), resolve(Config(), CPU)
    assert replace(found, choices=usual.choices) == usual
    assert not found.fixed_order
    assert "reproducible = True (nothing changes: on this CPU no row depends on others" in str(found.choices[-1])


@pytest.mark.parametrize(
    ("settings", "lack"),
    [
        ({}, "the library, or a part of it, is not there"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2"),
    ],
)
def test_a_cpu_whose_products_are_not_the_native_librarys_is_refused(settings: dict[str, Any], lack: str) -> None:
    with pytest.raises(InvalidSetting, match=f"needs dtype float32, tensor_parallel 1 and the native .*; {lack}"):
        resolved(replace(CPU, is_native=False), **settings)


def test_on_a_gpu_steps_have_a_fixed_order_and_no_bursts() -> None:
    found = resolved(GPU)
    assert found.fixed_order
    assert (found.max_burst, found.min_tokens, found.num_slots) == (1, 8, 256)
    assert found.choices[-1].name == "reproducible"
    assert resolved(GPU, max_batch_size=2).num_slots == 8
    usual = resolve(Config(max_batch_size=2), GPU)
    assert (usual.fixed_order, usual.max_burst, usual.num_slots) == (False, 4, 2)


@pytest.mark.parametrize(("how", "rows"), [({"quantize": "fp8"}, 64), ({}, 128)])
def test_products_of_codes_have_more_rows_than_those_that_widen_them(how: dict[str, str], rows: int) -> None:
    facts = GPU if how else replace(GPU, quantization="gptq, 4 bits")
    assert resolved(facts, **how).min_tokens == rows
    assert resolve(Config(**how), facts).min_tokens == 8


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"speculate": 4}, "speculate is 4, which does not go with reproducible on a GPU: guesses are computed"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2"),
        ({"lora_adapters": ("a=b",)}, "lora_adapters is"),
        ({"adapter_folder": "/a"}, "adapter_folder is /a"),
        ({"max_burst": 2}, "max_burst is 2"),
        ({"page_size": 16}, "page_size is 16"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused_by_name(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidSetting, match=why):
        resolve_reproducible(Config(reproducible=True, **settings), "gpu", is_native=False)
    if "tensor_parallel" not in settings:
        resolve_reproducible(Config(reproducible=True, **settings), "cpu", is_native=True)


def test_other_platforms_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="this is a tpu"):
        resolved(replace(GPU, platform="tpu"))


@pytest.mark.parametrize(
    ("kinds", "what"),
    [
        (ModelKinds(experts=True), "experts"),
        (ModelKinds(latent=True), "latent attention"),
        (ModelKinds(recurrent=True), "recurrent layers"),
    ],
)
def test_models_without_such_kernels_are_refused_by_name(kinds: ModelKinds, what: str) -> None:
    refuse_kinds(ModelKinds(), "a model")
    with pytest.raises(InvalidSetting, match=f"reproducible: a model has {what}"):
        refuse_kinds(kinds, "a model")
