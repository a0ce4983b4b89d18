"""Kinds of models by what their layers keep, each with the config of a tiny one."""

from typing import Any

from quire.reach import ChunkReach
from tests.crossings.capability import Layout, one_page_group
from tests.crossings.engine_setup import EngineSetup
from tests.models.cases import CASES

SWITCH_LENGTH = 16
SNAPSHOTS = {"snapshots": 12, "snapshot_tokens": 8}


def _model(name: str, **changes: Any) -> dict[str, Any]:
    return {**CASES[name], "vocab_size": 300, "max_position_embeddings": 256, **changes}


def _switches(setup: EngineSetup) -> None:
    setup.switch_length = SWITCH_LENGTH
    setup.prefix_key = lambda length: int(length > SWITCH_LENGTH)


def _depends_on_length(setup: EngineSetup) -> None:
    setup.prefix_key = lambda length: length


# No layer reads all positions. Only settings are tried with it: the fake executor crosses its page groups.
WINDOWS_ALONE = _model("mistral", num_hidden_layers=1)

LAYOUTS = [
    Layout(name="full attention", switch_on=one_page_group((None,)), model=_model("llama", num_hidden_layers=1)),
    Layout(
        name="windows",
        covers=("Limits.page_groups",),
        switch_on=one_page_group((None, 8)),
        model=_model("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
    ),
    Layout(
        name="sinks",
        switch_on=one_page_group((8, None)),
        model=_model("gpt_oss", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
        in_fake=False,  # where it is the same as windows
    ),
    Layout(
        name="chunks and windows",
        switch_on=one_page_group((None, 8, ChunkReach(12), ChunkReach(2))),
        model={},
        in_models=False,
    ),
    Layout(name="windows alone", switch_on=one_page_group((8,)), model={}, in_models=False),
    Layout(
        name="latent attention",
        switch_on=one_page_group((None,)),
        model=_model("deepseek_v3", num_hidden_layers=2),
        in_fake=False,  # where it is the same as full attention
    ),
    Layout(
        name="recurrent layers",
        covers=("Limits.snapshots", "Limits.snapshot_tokens", "Config.snapshots"),
        switch_on=one_page_group((None,), **SNAPSHOTS),
        model=_model("qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
    ),
    Layout(
        name="longrope",
        switch_on=_switches,
        model=_model("phi3-long", num_hidden_layers=1, original_max_position_embeddings=SWITCH_LENGTH),
    ),
    Layout(
        name="rope by length",
        switch_on=_depends_on_length,
        model=_model("llama-dynamic", num_hidden_layers=1, max_position_embeddings=64),
    ),
]
