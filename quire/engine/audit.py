"""Repairs the accounts of pages."""

import logging

from quire.core.scheduler import Scheduler

log = logging.getLogger(__name__)

MAX_LINES = 20  # of a ledger, in the log


def repair_if_wrong(scheduler: Scheduler, thorough: bool) -> bool:
    """While nothing runs: are all pages back? Where not, log the ledger and begin anew. Returns whether it did.

    By counts alone unless `thorough`, which looks at every page.
    """
    if not scheduler.is_at_rest or (scheduler.is_balanced and not thorough):
        return False
    lines = scheduler.discrepancies()
    if not lines and scheduler.is_balanced:
        return False
    more = f" and {len(lines) - MAX_LINES} more" if len(lines) > MAX_LINES else ""
    ledger = "; ".join(lines[:MAX_LINES]) or "a slot is lost"
    log.error("the accounts of pages are wrong and begin anew, with an empty cache: %s%s", ledger, more)
    scheduler.begin_anew()
    return True
