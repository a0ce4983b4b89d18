"""Logging of commands to standard error."""

import logging
import sys


def log_to_stderr(quiet: bool) -> None:
    """Show the engine's choices and warnings; warnings only when quiet."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("quire")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
