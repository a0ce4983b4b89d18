"""Settings for one user at a terminal."""

from dataclasses import replace

from quire.config import Config


def for_one_user(config: Config) -> Config:
    """One sequence at a time unless more were asked for, and nothing compiled that one prompt does not need."""
    return replace(config, max_batch_size=config.max_batch_size or 1, compile_ahead=False)
