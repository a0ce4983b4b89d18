"""Capabilities that an engine is made with."""

from collections.abc import Callable

from quire.ipc.messages import Failed
from quire.request import Request
from tests.crossings.capability import EngineSetting
from tests.crossings.engine_setup import ADAPTER_SLOTS, ADAPTERS, GUESSES, HOST_PAGES, EngineSetup


def _limits(**changes: object) -> Callable[[EngineSetup], None]:
    def switch_on(setup: EngineSetup) -> None:
        setup.limits |= changes

    return switch_on


def _one_of(**choices: tuple[object, ...]) -> Callable[[EngineSetup], None]:
    """Each of these limits is one of those given."""

    def switch_on(setup: EngineSetup) -> None:
        setup.limits |= {name: setup.chance.choice(values) for name, values in choices.items()}

    return switch_on


def _no_lookahead(setup: EngineSetup) -> None:
    setup.lookahead = 0


def _two_steps_ahead(setup: EngineSetup) -> None:
    setup.lookahead = 2


def _few_pages(setup: EngineSetup) -> None:
    setup.has_few_pages = True


def _bursts(setup: EngineSetup) -> None:
    setup.limits["max_burst"] = setup.chance.choice([2, 4])
    setup.max_burst_s = setup.chance.choice([float("inf"), 0.01])


def _short_steps(setup: EngineSetup) -> None:
    setup.max_step_s = setup.chance.choice([0.001, 0.004])


def _adapters(setup: EngineSetup) -> None:
    setup.adapters = ADAPTERS
    setup.limits["max_loras"] = ADAPTER_SLOTS


def _guesses_by_lookup(setup: EngineSetup) -> None:
    setup.guesses = "lookup"
    setup.limits |= {"max_guesses": GUESSES, "looks_up": True}


def _guesses_by_draft(setup: EngineSetup) -> None:
    setup.guesses = "draft"
    setup.limits |= {"max_guesses": GUESSES, "looks_up": False}


def _host_tier(setup: EngineSetup) -> None:
    setup.has_few_pages = True  # or none would leave for the host
    setup.limits |= {
        "host_pages": HOST_PAGES,
        "max_page_saves": setup.chance.choice([16, 2]),
        "max_page_restores": setup.chance.choice([16, 1]),
        "restores_ahead": setup.chance.random() < 0.5,
    }


def _cache_folder(setup: EngineSetup) -> None:
    setup.keeps_folder = True
    if "host_pages" not in setup.limits:
        _host_tier(setup)


def _coded_weights(setup: EngineSetup) -> None:
    setup.quantize = "int8"


def _coded_pages(setup: EngineSetup) -> None:
    setup.page_dtype = "int8"


def _is_overloaded(_: object, request: Request, failed: Failed) -> bool:
    return failed.kind == "overloaded"


SETTINGS = [
    EngineSetting(
        name="no look-ahead",
        covers=("Config.lookahead",),
        config={"lookahead": 0},
        fills="lookahead",
        in_servers=True,
        switch_on=_no_lookahead,
    ),
    EngineSetting(name="two steps ahead", config={"lookahead": 2}, fills="lookahead", switch_on=_two_steps_ahead),
    EngineSetting(
        name="few pages",  # so that eviction and preemption are the rule
        covers=("Config.num_pages", "Limits.num_pages", "Config.memory_fraction"),
        config={"num_pages": 40},
        in_servers=True,
        switch_on=_few_pages,
    ),
    EngineSetting(
        name="few slots",
        covers=("Config.max_batch_size", "Limits.max_batch_size"),
        config={"max_batch_size": 2},
        switch_on=_one_of(max_batch_size=(1, 2)),
    ),
    EngineSetting(
        name="small chunks",
        covers=("Config.max_batch_prefill_tokens", "Limits.max_batch_prefill_tokens"),
        config={"max_batch_prefill_tokens": 5},
        switch_on=_one_of(max_batch_prefill_tokens=(1, 3, 5)),
    ),
    EngineSetting(
        name="steps without room for prompts",  # while all slots decode
        covers=("Limits.max_step_tokens",),
        switch_on=_limits(max_step_tokens=4, max_batch_size=4),
    ),
    EngineSetting(
        name="short prompts first",
        covers=("Limits.short_prompt",),
        switch_on=_one_of(short_prompt=(0, 4)),
    ),
    EngineSetting(
        name="bursts",
        covers=("Config.max_burst", "Config.max_burst_ms", "Limits.max_burst"),
        config={"max_burst": 4},
        in_servers=True,
        switch_on=_bursts,
    ),
    EngineSetting(
        name="short steps",
        covers=("Config.max_step_ms",),
        config={"max_step_ms": 1.0},
        switch_on=_short_steps,
    ),
    EngineSetting(
        name="admission rule",
        covers=(
            "Config.waiting_served_ratio",
            "Config.max_waiting_tokens",
            "Limits.waiting_served_ratio",
            "Limits.max_waiting_tokens",
        ),
        config={"waiting_served_ratio": 1.2, "max_waiting_tokens": 3},
        switch_on=_one_of(waiting_served_ratio=(0.5, 1.2), max_waiting_tokens=(3, 10)),
    ),
    EngineSetting(
        name="bounded total",
        covers=("Config.max_batch_total_tokens", "Limits.max_batch_total_tokens"),
        config={"max_batch_total_tokens": 80},
        switch_on=_one_of(max_batch_total_tokens=(64, 80)),
    ),
    EngineSetting(
        name="bounded queue",
        covers=("Config.max_queued", "Limits.max_queued"),
        config={"max_queued": 4},
        switch_on=_one_of(max_queued=(6, 12)),
        excuses=_is_overloaded,
    ),
    EngineSetting(
        name="no prefix cache",
        covers=("Config.prefix_caching", "Limits.prefix_caching"),
        config={"prefix_caching": False},
        in_servers=True,
        switch_on=_limits(prefix_caching=False),
    ),
    EngineSetting(
        name="host tier",
        covers=(
            "Config.host_cache_gib",
            "Limits.host_pages",
            "Limits.max_page_saves",
            "Limits.max_page_restores",
            "Limits.restores_ahead",
        ),
        config={"host_cache_gib": 0.01},
        in_servers=True,
        switch_on=_host_tier,
    ),
    EngineSetting(
        name="cache folder",
        covers=(
            "FolderSettings.cache_folder",
            "FolderSettings.cache_folder_gib",
            "FolderSettings.cache_folder_write_mib_s",
        ),
        config={"cache_folder": "pages"},
        switch_on=_cache_folder,
        in_models=False,  # tests/page_folder has the bytes of pages
    ),
    EngineSetting(
        name="adapters",
        covers=("Config.lora_adapters", "Config.max_loras", "Config.max_lora_rank", "Limits.max_loras"),
        config={"lora_adapters": ("a", "b", "c"), "max_loras": ADAPTER_SLOTS},
        switch_on=_adapters,
    ),
    EngineSetting(
        name="guesses by lookup",
        covers=("Config.speculate", "Limits.max_guesses", "Limits.looks_up"),
        config={"speculate": GUESSES},
        fills="guesses",
        in_servers=True,
        switch_on=_guesses_by_lookup,
    ),
    EngineSetting(
        name="guesses by draft",
        covers=("Config.draft_model",),
        config={"speculate": GUESSES, "draft_model": "the model itself"},
        fills="guesses",
        switch_on=_guesses_by_draft,
    ),
    EngineSetting(
        name="reproducible on a GPU",
        covers=("Config.reproducible", "Limits.replays", "Limits.forces_tokens"),
        config={"reproducible": True},
        switch_on=_limits(replays=True, forces_tokens=False),
        in_models=False,  # GPU kernels have the bits that it is about
    ),
    EngineSetting(
        name="8-bit weights",
        covers=("Config.quantize",),
        config={"quantize": "int8"},
        switch_on=_coded_weights,
        in_fake=False,
    ),
    EngineSetting(
        name="8-bit pages",
        covers=("Config.kv_cache_dtype",),
        config={"kv_cache_dtype": "int8"},
        switch_on=_coded_pages,
        in_fake=False,
    ),
]
