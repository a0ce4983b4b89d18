"""Decides what the memory of a device is used for: pages, and snapshots of the state of slots."""

import sys
from typing import NamedTuple

from quire.errors import InvalidSetting
from quire.settings.choice import ASKED_FOR, Choice
from quire.settings.config import Config
from quire.settings.resolve import Facts, Resolved

RESERVE_BYTES = 256 * 2**20  # for fragments, programs and small arrays
# For pages on their way between a GPU and the host: those of two fetches, a copy of one, and those that are saved.
MOVING_BYTES = 3328 * 2**20
MAX_ARRAY_NUMBERS = 2**31 - 1  # whose places the kernels of a GPU count in 32 bits
MAX_HOST_CACHE_BYTES = 2 * 2**30
PAGE_STEP = 64  # the number of pages is a multiple of this, so that compiled programs are found again
SNAPSHOTS_PER_SLOT, MIN_SNAPSHOTS = 4, 16
SNAPSHOT_SHARE = 4  # snapshots take at most one part in this many of the memory of the cache


def resolve_pages(
    config: Config,
    resolved: Resolved,
    facts: Facts,
    step_bytes: int,
    page_bytes: int,
    longest: int,
    state_bytes: int = 0,
    page_numbers: int = 0,
) -> Choice[int]:
    """The number of pages: they fill the memory besides weights, the largest step and a reserve.

    `longest` is the number of pages that a sequence of max_total_tokens has at once. `state_bytes`: of all slots,
    which is not in pages. `page_numbers`: those of one page in the largest array of a device.
    """
    reserve = RESERVE_BYTES + (MOVING_BYTES if config.host_cache_gib and facts.platform == "gpu" else 0)
    left = resolved.memory_limit_bytes - facts.weight_bytes - step_bytes - state_bytes - reserve
    state = f"{as_size(state_bytes)} state of slots - " if state_bytes else ""
    sum_line = (
        f"{as_size(resolved.memory_limit_bytes)} allowed - {as_size(facts.weight_bytes)} weights - "
        f"{as_size(step_bytes)} largest step - {state}{as_size(reserve)} reserve = {as_size(left)}, "
        f"at {as_size(page_bytes)} a page"
    )
    needed = longest + 1  # page 0 is not handed out
    most = MAX_ARRAY_NUMBERS // page_numbers if page_numbers and facts.platform == "gpu" else sys.maxsize
    if config.num_pages is not None:
        if config.num_pages > most:
            raise InvalidSetting(f"num_pages is {config.num_pages}; kernels reach {most} pages of this model")
        choice = Choice("num_pages", config.num_pages, ASKED_FOR)
    else:
        useful = longest * resolved.max_batch_size + 1
        count, reason = max(0, left) // page_bytes, sum_line
        if facts.platform == "cpu" and count * page_bytes > MAX_HOST_CACHE_BYTES:
            count = MAX_HOST_CACHE_BYTES // page_bytes
            reason = f"{as_size(MAX_HOST_CACHE_BYTES)} at {as_size(page_bytes)} a page, to leave the host its memory"
        if count > useful:
            count = min(count, -(-useful // PAGE_STEP) * PAGE_STEP)  # the rest keeps prefixes
            reason = f"room for {(rows := resolved.max_batch_size)} sequence{'s' * (rows > 1)} of max_total_tokens"
        if count > most:
            count, reason = most, f"kernels reach {most} pages of this model"
        count = rounded if (rounded := count - count % PAGE_STEP) >= needed else count
        choice = Choice("num_pages", count, reason)
    if choice.value < needed:
        raise InvalidSetting(
            f"{choice.value} pages of {resolved.page_size} tokens do not hold one sequence of max_total_tokens = "
            f"{resolved.max_total_tokens}, which needs {needed}: {sum_line}"
        )
    if choice.value * page_bytes > max(left, 0):
        raise InvalidSetting(f"num_pages = {choice.value} needs {as_size(choice.value * page_bytes)}: {sum_line}")
    return choice


class SnapshotSizes(NamedTuple):
    """The sizes that a number of snapshots depends on."""

    slots: int
    slot_bytes: int  # of the state of one
    step_bytes: int
    page_bytes: int
    longest: int  # pages that a sequence of max_total_tokens has at once


def resolve_snapshots(config: Config, resolved: Resolved, facts: Facts, sizes: SnapshotSizes) -> Choice[int]:
    """The number of snapshots of the state of slots, for a model that has such a state."""
    if config.snapshots is not None:
        return Choice("snapshots", config.snapshots, ASKED_FOR)
    if not config.prefix_caching:
        return Choice("snapshots", 0, "prefix_caching is off")
    slots, each = sizes.slots, sizes.slot_bytes
    useful = max(MIN_SNAPSHOTS, SNAPSHOTS_PER_SLOT * slots)
    state_bytes = (slots + 1) * each
    left = resolved.memory_limit_bytes - facts.weight_bytes - sizes.step_bytes - state_bytes - RESERVE_BYTES
    needed = sizes.longest + 1 if config.num_pages is None else config.num_pages
    beside = left - needed * sizes.page_bytes
    if facts.platform == "cpu":
        left = min(left, MAX_HOST_CACHE_BYTES)
    fitting = max(0, min(left // SNAPSHOT_SHARE, beside) // each - 1)  # one more takes the copies of padding
    if fitting < useful:
        room = f"a quarter of the cache's {as_size(max(0, left))}"
        if beside < left // SNAPSHOT_SHARE:
            room = f"the {as_size(max(0, beside))} that {needed} pages leave"
        return Choice("snapshots", fitting, f"{room}, at {as_size(each)} each")
    plural = "s" * (slots > 1)
    return Choice("snapshots", useful, f"enough for the prefixes of {slots} sequence{plural}, at {as_size(each)} each")


def as_size(num_bytes: int) -> str:
    """A size in the largest unit of which there is at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
