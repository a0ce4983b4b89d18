"""The host's memory behind the prefix cache of a deployment."""

import os
from dataclasses import replace

from quire.core.limits import Limits
from quire.engine.deployment import Deployment
from quire.host_cache_settings import resolve_host_cache


def with_host_pages(limits: Limits, deployment: Deployment) -> Limits:
    """The limits, whose other numbers are final, with the host pages that were asked for."""
    facts, page_bytes = deployment.facts, deployment.host_page_bytes
    free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if facts.platform == "cpu":
        free_bytes -= facts.weight_bytes + limits.num_pages * page_bytes
    pages_of_step = limits.pages_for(limits.max_batch_prefill_tokens) * len(limits.page_groups)
    config = deployment.config
    num_pages, saves, restores = resolve_host_cache(config, facts.platform, free_bytes, page_bytes, pages_of_step)
    return replace(
        limits, host_pages=num_pages, max_page_saves=saves, max_page_restores=restores, host_page_bytes=page_bytes
    )
