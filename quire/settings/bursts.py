"""Decides how many tokens a step may give each sequence."""

from quire.errors import InvalidSetting
from quire.settings.choice import Choice, chosen
from quire.settings.config import Config

# On one device. A GPU reads the first in 2 ms and the second in 3, in which the host can start a step.
SMALL_MODEL_BYTES, MIDDLE_MODEL_BYTES = 8 * 2**30, 12 * 2**30
OFFLINE_BURST = 2  # of a model between them: more gain nothing


def resolve_max_burst(
    config: Config, platform: str, default: int, page_size: int, weight_bytes: int, is_served: bool
) -> Choice[int]:
    """`default`: of the platform, for small models. `is_served`: to clients that wait for tokens."""
    if config.max_burst is not None and config.max_burst > page_size:
        raise InvalidSetting(f"max_burst is {config.max_burst}; it can be as many as page_size, {page_size}")
    most, reason = min(default, page_size), f"{platform.upper()} default"
    if config.reproducible and platform == "gpu":
        most, reason = 1, "reproducible: tokens of a burst have a program of their own"
    elif most > 1 and weight_bytes > SMALL_MODEL_BYTES:
        if is_served or weight_bytes > MIDDLE_MODEL_BYTES:
            most, reason = 1, "a step of so large a model takes longer than to start it"
        else:
            most, reason = min(OFFLINE_BURST, page_size), "offline: to start a step takes nearly as long as the step"
    return chosen("max_burst", config.max_burst, most, reason)
