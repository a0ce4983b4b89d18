"""Settings for one user at a terminal."""

from dataclasses import replace

from quire.settings.config import Config


def for_one_user(config: Config) -> Config:
    """One sequence at a time unless the settings allow more. Only the programs for one prompt are compiled."""
    return replace(config, max_batch_size=config.max_batch_size or 1, compile_ahead=False)
