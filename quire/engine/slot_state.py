"""Settings of models whose layers keep state in slots beside pages."""

from quire.choice import Choice
from quire.config import Config
from quire.errors import InvalidSetting


def resolve_prefix_caching(config: Config, count: int, name: str) -> Choice[bool]:
    """Prefix caching of a model with `count` recurrent layers.

    Raises for a setting that needs the state of a slot as it was some tokens before.
    """
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
    reason = f"{has}: a prompt is computed from its first token on, since their state is not in pages"
    return Choice("prefix_caching", False, reason)
