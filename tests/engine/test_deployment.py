"""The numbers of a deployment, before any weight is read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.limits import Limits
from quire.engine.building.deployment import Deployment, cache_capacity
from quire.engine.building.page_count import with_pages, with_snapshots
from quire.engine.building.plan import plan_deployment
from quire.errors import InvalidSetting
from quire.ops.native import library
from quire.settings.config import Config
from quire.settings.machine import memory_bytes
from quire.settings.memory import RESERVE_BYTES
from tests.models.cases import CASES


def planned(folder: Path, name: str, *, num_engines: int = 1, **settings: Any) -> Deployment:
    config = folder / "config.json"
    config.write_text(json.dumps(CASES[name]))
    given: dict[str, Any] = {"dtype": "float32", "page_size": 4, "max_batch_size": 4, "max_total_tokens": 128}
    chosen = Config(f"random:{config}", cache_dir=str(folder), **(given | settings))
    return plan_deployment(chosen, num_engines=num_engines)


def test_a_model_with_windows_fits_more_sequences_and_the_text_says_how_many(tmp_path: Path) -> None:
    deployment = planned(tmp_path, "mistral", num_pages=301)
    assert deployment.limits.page_groups == (7,)
    assert cache_capacity(deployment) == {
        "tokens in the cache": "12,800",
        "sequences at their longest": "100 of 128 tokens (300 pages / 3 each)",
        "state of the layers": "attention over 7 tokens: 2 layers, 320 B a token",
        "windows": "window 7: 2 layers; 10.7x as many sequences of 128 tokens as without",
    }


def test_layers_with_and_without_windows_have_groups_of_their_own(tmp_path: Path) -> None:
    deployment = planned(tmp_path, "gemma3", num_pages=301)
    assert deployment.limits.page_groups == (None, 7, 7, 7)
    assert deployment.shapes.num_groups == 4
    assert cache_capacity(deployment) == {
        "tokens in the cache": "936",
        "sequences at their longest": "7 of 128 tokens (300 pages / 41 each)",
        "state of the layers": (
            "full attention: 1 layer, 128 B a token; attention over 7 tokens: 3 layers, 384 B a token"
        ),
        "windows": "full: 1 layer, window 7: 3 layers; 3.1x as many sequences of 128 tokens as without",
    }


def test_a_model_without_windows_has_one_group_and_no_word_of_them(tmp_path: Path) -> None:
    deployment = planned(tmp_path, "llama", num_pages=101)
    assert deployment.limits.page_groups == (None,)
    assert cache_capacity(deployment) == {
        "tokens in the cache": "400",
        "sequences at their longest": "3 of 128 tokens (100 pages / 32 each)",
        "state of the layers": "full attention: 2 layers, 256 B a token",
    }


def test_a_model_with_recurrent_layers_has_state_in_its_slots_and_snapshots_of_it(tmp_path: Path) -> None:
    deployment = planned(tmp_path, "qwen3_next", num_pages=101)
    assert deployment.limits.prefix_caching
    assert deployment.limits.snapshots == deployment.shapes.num_snapshots == 16
    # Three inputs of 2 x 40 channels and four matrices of 8 x 12, in three layers.
    assert deployment.layout.slot_bytes == 3 * 4 * (3 * 2 * 40 + 4 * 8 * 12)
    state = cache_capacity(deployment)["state of the layers"]
    assert state == "full attention: 1 layer, 256 B a token; recurrent: 3 layers, 7.3 KiB a sequence"
    # Of four slots, of the snapshots, and twice of padding.
    assert cache_capacity(deployment)["state of all slots"] == "160.9 KiB, with 16 snapshots"
    (choice,) = (choice for choice in deployment.choices if choice.name == "snapshots")
    assert (choice.value, choice.reason) == (16, "enough for the prefixes of 4 sequences, at 7.3 KiB each")


def test_there_are_more_snapshots_where_more_sequences_run_and_fewer_where_memory_is_short(tmp_path: Path) -> None:
    assert planned(tmp_path, "qwen3_next", num_pages=101, max_batch_size=9).limits.snapshots == 36
    deployment = planned(tmp_path, "qwen3_next", num_pages=101)
    some = replace(deployment.facts, weight_bytes=0)
    for memory, count in ((45 * 7488, 7), (4 * 7488, 0)):  # of which five are those of slots and padding
        resolved = replace(deployment.resolved, memory_limit_bytes=RESERVE_BYTES + memory)
        short = with_snapshots(replace(deployment, facts=some, resolved=resolved), 8 * 7488 if count else 0)
        assert short.limits.snapshots == count
        assert short.limits.prefix_caching == (count > 0)
    (caching,) = (choice for choice in short.choices if choice.name == "prefix_caching")
    assert "has recurrent layers, and there are no snapshots of them: a prompt is computed" in caching.reason


@pytest.mark.parametrize(("room", "more_pages", "count"), [(0, 0, 0), (8, 0, 7), (8, 8, 5)])
def test_snapshots_leave_the_pages_of_the_longest_sequence_their_memory(
    tmp_path: Path, room: int, more_pages: int, count: int
) -> None:
    """`room` for so many, of which one takes the copies of padding; eight pages are as large as one and a bit."""
    deployment = planned(tmp_path, "qwen3_next")
    limits = replace(deployment.limits, max_sequence_tokens=4096)
    needed = limits.pages_of(4096) + 1
    memory = needed * deployment.page_bytes + (5 + room) * 7488
    short = replace(
        deployment,
        config=replace(deployment.config, num_pages=needed + more_pages if more_pages else None),
        facts=replace(deployment.facts, weight_bytes=0),
        resolved=replace(deployment.resolved, memory_limit_bytes=RESERVE_BYTES + memory),
        limits=limits,
    )
    assert with_snapshots(short, 0).limits.snapshots == count


@pytest.mark.parametrize("settings", [{"snapshots": 0}, {"prefix_caching": False}])
def test_snapshots_can_be_turned_off(tmp_path: Path, settings: dict[str, Any]) -> None:
    deployment = planned(tmp_path, "qwen3_next", num_pages=101, **settings)
    assert deployment.limits.snapshots == 0
    assert not deployment.limits.prefix_caching
    assert cache_capacity(deployment)["state of all slots"] == "36.6 KiB"


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"snapshots": 4}, "snapshots is 4; it does not go with .*, whose layers keep everything in pages"),
        ("qwen3_next", {"snapshots": -1}, "snapshots is -1; it must be at least 0"),
        ("qwen3_next", {"snapshots": 2, "prefix_caching": False}, "snapshots is 2; it needs prefix_caching"),
    ],
)
def test_snapshots_that_cannot_be_are_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        planned(tmp_path, family, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"speculate": 2},
            "speculate is 2; .* the recurrent layers of .*: their state cannot be taken back",
        ),
        (
            {"host_cache_gib": 0.5},
            "host_cache_gib is 0.5; .* the recurrent layers of .*: pages alone do not continue",
        ),
    ],
)
def test_what_needs_an_older_state_of_recurrent_layers_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        planned(tmp_path, "qwen3_next", **settings)


def test_the_state_of_slots_is_a_part_of_the_memory(tmp_path: Path) -> None:
    """More pages than fit, for the sum that refuses them."""
    message = r"allowed - .* weights - .* largest step - 1\.5 MiB state of slots - .* reserve = "
    with pytest.raises(InvalidSetting, match=message):
        planned(tmp_path, "qwen3_next", max_batch_size=208, num_pages=2**32)


def test_pages_are_enough_for_all_sequences_at_their_longest_and_no_more(tmp_path: Path) -> None:
    without, with_windows = planned(tmp_path, "llama"), planned(tmp_path, "mistral")
    assert without.limits.num_pages == 4 * 32 + 64  # a multiple of 64 above 4 sequences of 32 pages and page 0
    assert with_windows.limits.num_pages == 64
    assert with_windows.shapes.num_pages == 64


@pytest.mark.parametrize(("groups", "tokens"), [((None,), 400), ((None, None), 200), ((9,), 8532), ((None, 9), 380)])
def test_the_capacity_in_tokens_is_that_of_sequences_of_the_maximum_length(
    groups: tuple[int | None, ...], tokens: int
) -> None:
    limits = Limits(
        page_size=4,
        num_pages=101,
        max_batch_size=1,
        max_step_tokens=1,
        max_batch_prefill_tokens=1,
        max_sequence_tokens=256,
        page_groups=groups,
    )
    assert limits.capacity_tokens == tokens


def test_host_memory_is_cut_into_pages_and_the_text_says_how_many_tokens_it_holds(tmp_path: Path) -> None:
    deployment = planned(tmp_path, "gemma3", num_pages=301, host_cache_gib=0.001)
    limits = deployment.limits
    page_bytes = deployment.page_bytes
    assert limits.host_page_bytes == page_bytes
    assert limits.host_pages == int(0.001 * 2**30) // page_bytes
    tokens = limits.host_pages // 4 * 4  # of 4 groups, in pages of 4
    assert cache_capacity(deployment)["tokens in host memory"].startswith(f"{tokens:,} ({limits.host_pages:,} pages, ")
    assert limits.max_page_saves >= limits.pages_for(limits.max_batch_prefill_tokens) * 4, "what a full step evicts"


@pytest.mark.parametrize(("gib", "pins", "ahead"), [(0.001, True, True), (0.001, False, False), (0.0, True, False)])
def test_pages_come_beside_the_computation_where_their_memory_is_pinned(
    tmp_path: Path, gib: float, pins: bool, ahead: bool
) -> None:
    deployment = planned(tmp_path, "llama", host_cache_gib=gib)
    deployment = replace(deployment, facts=replace(deployment.facts, pins_memory=pins))
    assert with_pages(deployment, 0).limits.restores_ahead is ahead


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_cache_gib": -1.0}, "host_cache_gib is -1.0; it must be at least 0"),
        ({"host_cache_gib": float("nan")}, "host_cache_gib is nan; it must be at least 0"),
        ({"host_cache_gib": float("inf")}, "host_cache_gib is inf; it must be at least 0"),
        ({"host_cache_gib": 1e6}, "host_cache_gib is 1000000.0; the host has .* of memory besides weights and pages"),
        ({"host_cache_gib": 1e-9}, "host_cache_gib is 1e-09; a page takes"),
        ({"host_cache_gib": 1.0, "prefix_caching": False}, "host_cache_gib is 1.0; it needs prefix_caching"),
    ],
)
def test_host_memory_that_cannot_be_used_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        planned(tmp_path, "llama", **settings)


def test_reproducible_on_a_cpu_needs_every_part_of_the_native_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "need", lambda part: part != "codes")
    with pytest.raises(InvalidSetting, match="it needs the native library with all its parts"):
        planned(tmp_path, "llama", reproducible=True)


def test_engines_of_one_server_share_the_memory_of_the_host(tmp_path: Path) -> None:
    alone, third = (planned(tmp_path, "llama", num_engines=number) for number in (1, 3))
    assert alone.facts.memory_bytes == alone.facts.host_bytes == memory_bytes()
    assert third.facts.memory_bytes == third.facts.host_bytes == memory_bytes() // 3
    assert third.resolved.memory_limit_bytes == pytest.approx(alone.resolved.memory_limit_bytes / 3, abs=2)
    gib = memory_bytes() / 2**30
    assert planned(tmp_path, "llama", num_pages=101, host_cache_gib=gib / 2).limits.host_pages > 0
    with pytest.raises(InvalidSetting, match=r"host_cache_gib is .*; the host has .* besides weights and pages"):
        planned(tmp_path, "llama", num_pages=101, host_cache_gib=gib / 2, num_engines=3)
