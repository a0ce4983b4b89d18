"""Settings of the host's memory behind the prefix cache."""

import logging
import math
from dataclasses import replace
from typing import NamedTuple

from quire.errors import InvalidSetting
from quire.settings.config import Config
from quire.settings.machine import memory_bytes
from quire.settings.memory import as_size
from quire.settings.page_folder import FolderSettings
from quire.settings.peers import PeerSettings

log = logging.getLogger(__name__)

# Bytes that a step may copy from the host; fewer while sequences decode, if that would slow them.
RESTORED_BYTES = {"cpu": 16 * 2**20}
RESTORED_BYTES_ELSEWHERE = 512 * 2**20
# A GPU's pages are in blocks of several on the host. Memory for pages of blocks that are not used, or not any more: a
# share of that of all pages, and at most so much.
MAX_SPARE, MAX_SPARE_BYTES = 1 / 8, 4 * 2**30
HOST_CACHE_GIB = 4.0  # for pages from elsewhere, or an eighth of the memory


class HostCache(NamedTuple):
    """Pages of the host, and how many of them a step may write and read."""

    num_pages: int
    max_saves: int
    max_restores: int


def with_host_cache(config: Config, peers: PeerSettings, folder: FolderSettings) -> Config:
    """The settings of an engine. Pages that come from elsewhere come into host memory, so there must be some."""
    sources = {"role": peers.role, "cache_folder": folder.cache_folder}
    given = [name for name, value in sources.items() if value is not None]
    if config.host_cache_gib or not given:
        return config
    gib = round(min(HOST_CACHE_GIB, memory_bytes() / 2**30 / 8), 2)
    log.info("host_cache_gib = %g (pages come there: %s)", gib, ", ".join(given))
    return replace(config, host_cache_gib=gib)


def num_spare_pages(num_pages: int, page_bytes: int) -> int:
    """Of a GPU's pages on the host: how many more there is memory for than are used."""
    return min(int(num_pages * MAX_SPARE), MAX_SPARE_BYTES // page_bytes)


def num_pages_within(num_bytes: int, page_bytes: int, platform: str) -> int:
    """Pages that take so many bytes together with those to spare."""
    most = num_bytes // page_bytes
    if platform != "gpu" or not most:
        return most
    return max(1, int(most / (1 + MAX_SPARE)), most - MAX_SPARE_BYTES // page_bytes)


def resolve_host_cache(
    config: Config, platform: str, free_bytes: int, page_bytes: int, pages_of_step: int
) -> HostCache:
    """`free_bytes`: of the host's memory, those that weights and pages leave. `page_bytes`: of all devices together.
    `pages_of_step`: those that the prompts of a step fill."""
    asked = config.host_cache_gib
    if not 0 <= asked < math.inf:
        raise InvalidSetting(f"host_cache_gib is {asked}; it must be at least 0")
    if not asked:
        return HostCache(0, 0, 1)
    num_bytes = int(asked * 2**30)
    if num_bytes > free_bytes:
        raise InvalidSetting(
            f"host_cache_gib is {asked}; the host has {as_size(free_bytes)} of memory besides weights and pages"
        )
    num_pages = num_pages_within(num_bytes, page_bytes, platform)
    if not num_pages:
        raise InvalidSetting(f"host_cache_gib is {asked}; a page takes {as_size(page_bytes)}")
    restores = max(1, RESTORED_BYTES.get(platform, RESTORED_BYTES_ELSEWHERE) // page_bytes)
    # A step evicts as many pages as it fills, or restores, and a few for decodes.
    saves = pages_of_step + 2 * restores
    return HostCache(num_pages, saves, restores)
