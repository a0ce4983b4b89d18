"""Reproducible engines on each platform."""

from dataclasses import replace
from typing import Any

import pytest

from quire.settings.config import Config
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


def test_on_a_gpu_steps_have_a_fixed_order_and_no_bursts() -> None:
    found = resolved(GPU)
    assert found.fixed_order
    assert (found.max_burst, found.min_tokens, found.num_slots) == (1, 8, 256)
    assert found.choices[-1].name == "reproducible"
    assert resolved(GPU, max_batch_size=2).num_slots == 8
    usual = resolve(Config(max_batch_size=2), GPU)
    assert (usual.fixed_order, usual.max_burst, usual.num_slots) == (False, 4, 2)


@pytest.mark.parametrize(("quantize", "rows"), [({"quantize": "fp8"}, 64), ({}, 128)])
def test_products_of_codes_have_more_rows_than_those_that_widen_them(quantize: dict[str, str], rows: int) -> None:
    facts = GPU if quantize else replace(GPU, quantization="gptq, 4 bits")
    assert resolved(facts, **quantize).min_tokens == rows
    assert resolve(Config(**quantize), facts).min_tokens == 8
