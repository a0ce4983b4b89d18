"""Settings of models whose layers keep state in slots beside pages."""

from dataclasses import replace

from quire.engine.building.deployment import Deployment
from quire.errors import InvalidSetting
from quire.settings.choice import ASKED_FOR, Choice
from quire.settings.config import Config
from quire.settings.resolve import MAX_HOST_CACHE_BYTES, RESERVE_BYTES, as_size

SNAPSHOTS_PER_SLOT = 4
MIN_SNAPSHOTS = 16
SHARE = 4  # snapshots take at most one part in this many of the memory of the cache


def refuse_what_needs_older_state(config: Config, count: int, name: str) -> None:
    """Raise for a setting that a model with `count` recurrent layers does not have: it needs the state of a slot as it
    was some tokens before."""
    has = f"{name} has {count} recurrent layer{'s' * (count > 1)}"
    if config.speculate:
        raise InvalidSetting(
            f"speculate is {config.speculate}; {has}, whose state cannot be taken back to where a guess was wrong. "
            "Remedy: leave it out"
        )
    if config.host_cache_gib:
        raise InvalidSetting(
            f"host_cache_gib is {config.host_cache_gib:g}; {has}, and pages alone do not continue a prompt. Remedy: "
            "leave it out, and --role and --cache-folder"
        )


def with_snapshots(deployment: Deployment, step_bytes: int) -> Deployment:
    """The deployment with the snapshots of its slots' state that it has room for, besides a step of `step_bytes`."""
    layout, config, name = deployment.layout, deployment.config, deployment.files.name
    if not layout.slot_specs:
        if config.snapshots is not None:
            raise InvalidSetting(
                f"snapshots is {config.snapshots}; {name} has no recurrent layers, and its pages are all that a prompt "
                "continues from. Remedy: leave it out"
            )
        return deployment
    count = len(layout.slot_specs)
    snapshots = _resolve_snapshots(deployment, step_bytes)
    choices = [choice for choice in deployment.choices if choice.name not in ("snapshots", "prefix_caching")]
    choices.append(snapshots)
    if not snapshots.value:
        reason = f"{name} has {count} recurrent layer{'s' * (count > 1)}: a prompt is computed from its first token on"
        choices.append(Choice("prefix_caching", False, f"{reason}, since there are no snapshots of their state"))
    return replace(
        deployment,
        shapes=replace(deployment.shapes, num_snapshots=snapshots.value),
        limits=replace(
            deployment.limits,
            snapshots=snapshots.value,
            prefix_caching=config.prefix_caching and snapshots.value > 0,
        ),
        choices=tuple(choices),
    )


def _resolve_snapshots(deployment: Deployment, step_bytes: int) -> Choice[int]:
    config, facts, slots = deployment.config, deployment.facts, deployment.limits.max_batch_size
    asked = config.snapshots
    if asked is not None:
        if asked < 0:
            raise InvalidSetting(f"snapshots is {asked}; it must be at least 0")
        if asked and not config.prefix_caching:
            raise InvalidSetting(f"snapshots is {asked}; it needs prefix_caching: they are a part of that cache")
        return Choice("snapshots", asked, ASKED_FOR)
    if not config.prefix_caching:
        return Choice("snapshots", 0, "prefix_caching is off")
    each = deployment.layout.slot_bytes
    useful = max(MIN_SNAPSHOTS, SNAPSHOTS_PER_SLOT * slots)
    left = deployment.resolved.memory_limit_bytes - facts.weight_bytes - step_bytes - (slots + 1) * each - RESERVE_BYTES
    limits, num_pages = deployment.limits, config.num_pages
    needed = limits.pages_of(limits.max_sequence_tokens) + 1 if num_pages is None else num_pages
    beside = left - needed * deployment.page_bytes
    if facts.platform == "cpu":
        left = min(left, MAX_HOST_CACHE_BYTES)
    fitting = max(0, min(left // SHARE, beside) // each - 1)  # one more takes the copies of padding
    if fitting < useful:
        room = f"a quarter of the cache's {as_size(max(0, left))}"
        if beside < left // SHARE:
            room = f"the {as_size(max(0, beside))} that {needed} pages leave"
        return Choice("snapshots", fitting, f"{room}, at {as_size(each)} each")
    plural = "s" * (slots > 1)
    return Choice("snapshots", useful, f"enough for the prefixes of {slots} sequence{plural}, at {as_size(each)} each")
