"""A cache of eight bits gives the same tokens whatever happens to its pages."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest

from quire.engine.building.plan import layout_of, refusal_case, traits_of
from quire.errors import InvalidSetting
from quire.executor.layer_state import page_layout
from quire.models.registry import build_model
from quire.ops.native import library
from quire.settings.config import Config
from quire.settings.refusals import refuse
from quire.settings.resolve import Facts, resolve
from tests.executor.conftest import DRAFTING, HOST_PAGES
from tests.executor.rig import FEW_SHAPES, Rig, config_of, quickly_compiled
from tests.executor.workload import workload
from tests.models.cases import CASES

pytestmark = pytest.mark.skipif(not library.load(), reason="rows are alike by the native library")
ONE_BY_ONE = {"max_batch_size": 1, "prefix_caching": False, "lookahead": 0}
SCHEDULES: dict[str, dict[str, Any]] = {
    "together, prefixes shared": {},
    "preempted": {"num_pages": 30, "prefix_caching": False, "lookahead": 2},
    "small chunks": {"max_batch_prefill_tokens": 7},
    "host memory": {"num_pages": 30, "host_pages": HOST_PAGES},
}


@pytest.fixture(scope="module")
def llama() -> Iterator[Rig]:
    with quickly_compiled():
        shapes = replace(FEW_SHAPES, page_dtype="float8_e4m3fn")
        rig = Rig(config_of("llama", num_hidden_layers=2), shapes, num_host_pages=HOST_PAGES)
    yield rig
    rig.executor.close()


@pytest.fixture(scope="module")
def drafted_gemma() -> Iterator[Rig]:
    """With windows, soft caps and a draft, whose keys and values are in the same pages."""
    with quickly_compiled():
        shapes = replace(DRAFTING, num_groups=2, page_dtype="int8")
        draft = config_of("llama", num_hidden_layers=1)
        rig = Rig(config_of("gemma2", num_hidden_layers=2), shapes, draft_config=draft, num_host_pages=HOST_PAGES)
    yield rig
    rig.executor.close()


@pytest.mark.parametrize("name", ["llama", "drafted_gemma"])
def test_tokens_do_not_depend_on_scheduling(request: pytest.FixtureRequest, name: str) -> None:
    rig: Rig = request.getfixturevalue(name)
    assert str(jax.tree.leaves(rig.executor.programs.compiler.pages)[0].dtype) == rig.shapes.page_dtype
    requests = workload(rig, 10)
    groups = len(rig.limits().page_groups)
    guesses = {"max_guesses": 0} if rig.shapes.guesses else {}
    alone = rig.run(requests, **ONE_BY_ONE, **guesses)
    assert not alone.failures
    for settings in SCHEDULES.values():
        scaled = {key: value * groups if key == "num_pages" else value for key, value in settings.items()}
        assert rig.run(requests, **scaled).tokens() == alone.tokens(), settings


def test_latent_attention_refuses_it_by_name() -> None:
    facts = Facts(platform="cpu", num_devices=1, memory_bytes=2**34, max_positions=256, weight_bytes=2**20)
    config = Config(kv_cache_dtype="int8")
    resolved = resolve(config, facts)
    model = build_model(CASES["deepseek_v2"])
    traits = traits_of("it", model, layout_of(model, resolved, None))
    with pytest.raises(InvalidSetting, match="kv_cache_dtype is int8; it does not go with the latent attention layers"):
        refuse(refusal_case(config, facts, resolved, traits))
    layout = layout_of(build_model(CASES["qwen3_next"]), resolved, None)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(layout.slot_structure(1))} == {"float32"}
    assert layout.page_dtype == "int8"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_a_page_has_half_the_bytes_and_its_scales(dtype: str) -> None:
    layers = build_model(config_of("llama", head_dim=64)).layers
    plain = page_layout(layers, 16, 128, "bfloat16")
    coded = page_layout(layers, 16, 128, "bfloat16", page_dtype=dtype)
    assert plain.page_bytes / coded.page_bytes == 2 * 64 / (64 + 2)
