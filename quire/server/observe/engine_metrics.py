"""Metrics of the engine processes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from quire.ipc.messages import BATCH_SIZES, DURATIONS_S, Stats
from quire.server.observe.exposition import Exposition, Histogram

T = TypeVar("T")

_COUNTERS = {
    "preemptions": ("quire_preemptions", "Sequences that lost their pages to older ones."),
    "evicted_pages": ("quire_evicted_pages", "Cached pages given up for others."),
    "lost_pages": (
        "quire_host_lost_pages",
        "Pages given up without a copy on the host: there was no room for it, or it failed.",
    ),
    "cached_tokens": ("quire_prefix_hit_tokens", "Tokens found in the prefix cache when a sequence was admitted."),
    "guesses": ("quire_guesses", "Tokens guessed ahead of steps that have results."),
    "right_guesses": ("quire_right_guesses", "Guesses that were right: tokens that took no step of their own."),
    "guessed_chunks": ("quire_guessed_chunks", "Times that a step verified guesses of a sequence."),
    "faults": ("quire_step_faults", "Steps that failed, and failed checks of an idle device."),
    "requests_blamed": ("quire_faults_isolated", "Requests that made their steps fail; only they were ended."),
    "shrinks": ("quire_step_shrinks", "Times that steps were made smaller because the device ran out of memory."),
    "repairs": ("quire_page_repairs", "Times that the accounting of pages was wrong and was reset."),
    "restarts": ("quire_engine_restarts", "Engine processes that ended and were restarted."),
    "padding_tokens": (
        "quire_step_padding_tokens_total",
        "Tokens of programs beyond those of the steps. Kernels of CPUs skip most of their time.",
    ),
    "late_compilations": ("quire_late_compilations", "Programs compiled while requests waited for them."),
}
# By direction, between the device and the host. The last word completes the direction to a name in the statistics.
_HOST_COUNTERS = (
    ("quire_host_copied_pages", "Pages copied between the device and the host.", "_pages"),
    ("quire_host_copied_bytes", "Bytes of these pages.", "_bytes"),
)
# By method, prefill or decode. The last word completes the method to a name in the statistics.
_STEP_COUNTERS = (
    ("quire_step_tokens", "Tokens computed.", "_tokens"),
    ("tgi_batch_inference_count", "Steps begun.", "_begun"),
    ("tgi_batch_inference_failure", "Steps that failed, or were discarded.", "_failed"),
)
_STEP_DURATIONS = (
    ("tgi_batch_forward_duration", "Seconds that the device took for a step.", ""),
    ("tgi_batch_inference_duration", "Seconds from planning a step to handing out its tokens.", "_inference"),
    ("tgi_batch_decode_duration", "Seconds to take in the tokens of a step.", "_complete"),
    ("tgi_batch_filter_duration", "Seconds to hand out the tokens of a step.", "_deliver"),
)


# By name: the help and the number of an engine.
_GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "tgi_queue_size": ("Sequences that wait.", lambda stats: stats.num_waiting),
    "tgi_batch_current_size": ("Sequences that run.", lambda stats: stats.num_running),
    "tgi_batch_current_max_tokens": (
        "Tokens that running sequences may have in the end.",
        lambda stats: stats.running_max_tokens,
    ),
    "tgi_batch_max_total_tokens": ("Tokens that may run together.", lambda stats: stats.max_total_tokens),
    "quire_slots_running": ("Slots whose sequences run.", lambda stats: stats.num_running),
    "quire_slots_max": ("Slots: the most sequences that run together.", lambda stats: stats.num_slots),
    "quire_pages_free": ("Pages that hold nothing.", lambda stats: stats.free_pages),
    "quire_pages_active": (
        "Pages that sequences use.",
        lambda stats: stats.active_pages,
    ),
    "quire_pages_cached": ("Pages that only the prefix cache holds.", lambda stats: stats.cached_pages),
    "quire_pages_on_host": ("Pages that the host has.", lambda stats: stats.counters["host_pages"]),
    "quire_snapshots": (
        "Snapshots of recurrent layers' state that prompts can continue from.",
        lambda stats: stats.counters["snapshots"],
    ),
    "quire_snapshots_max": ("Snapshots that there can be.", lambda stats: stats.counters["num_snapshots"]),
    "quire_guess_acceptance": (
        "Share of guesses that were right; 0 before the first.",
        lambda stats: _share(stats.counters["right_guesses"], stats.counters["guesses"]),
    ),
    "quire_guess_tokens_per_step": (
        "Tokens that a sequence gets in a step with guesses, on average; 0 before the first.",
        lambda stats: _share(
            stats.counters["right_guesses"] + stats.counters["guessed_chunks"], stats.counters["guessed_chunks"]
        ),
    ),
    "quire_unfinished_programs": (
        "Programs that are still being compiled or loaded; steps run in larger ones meanwhile.",
        lambda stats: stats.counters["unfinished_programs"],
    ),
    "quire_last_step_age_seconds": ("Seconds since the last step that finished.", lambda stats: stats.idle_s),
}
# Of servers with a role. By name: the help, the label, and its values with their keys in the statistics.
_PEERS = (
    ("quire_peer_pages", "Pages exchanged with peers.", "direction",
     {"received": "received_pages", "sent": "sent_pages"}),
    ("quire_peer_bytes", "Bytes of pages exchanged with peers.", "direction",
     {"received": "received_bytes", "sent": "sent_bytes"}),
    ("quire_peer_pulls", "Prompts that a peer was to compute; all but those received were computed here.", "outcome",
     "pulls_"),
    ("quire_peer_prefills", "Prompts of peers that were to be computed here.", "outcome", "served_"),
)  # fmt: skip
# Of servers with a cache folder, likewise.
_FOLDER = (
    ("quire_folder_copied_pages", "Pages copied between the engine and its cache folder.", "direction",
     {"to_folder": "written_pages", "from_folder": "read_pages"}),
    ("quire_folder_copied_bytes", "Bytes of these pages.", "direction",
     {"to_folder": "written_bytes", "from_folder": "read_bytes"}),
    ("quire_folder_reads", "Prompts with pages in the cache folder; all but those found and waited were computed.",
     "outcome", "reads_"),
    ("quire_folder_saves", "Prompts whose pages were to be kept; of all but those written some are not.", "outcome",
     "saves_"),
    ("quire_folder_removed_pages", "Files removed from the cache folder.", "reason", "removed_"),
    ("quire_folder_errors", "Files that could not be read, or not written.", "operation",
     {"read": "read_errors", "write": "write_errors"}),
)  # fmt: skip
_FOLDER_GAUGES = (
    ("quire_pages_in_folder", "Pages of this model in the cache folder.", "folder_pages"),
    ("quire_folder_bytes", "Bytes of all files in the cache folder.", "folder_bytes"),
)
Labels = dict[str, str]


def write_engines(out: Exposition, engines: Mapping[int, Stats], *, is_labelled: bool = False) -> None:
    """Metrics of each engine by its number, which is a label where the server has several."""

    def write(kind: str, name: str, help: str, find: Callable[[Stats], Iterable[tuple[Labels, T]]]) -> None:
        found = ((number, label, value) for number, stats in engines.items() for label, value in find(stats))
        values = [({"engine": str(number)} | label if is_labelled else label, value) for number, label, value in found]
        out.family(kind, name, help, values)  # type: ignore[arg-type]

    for name, (help, read) in _GAUGES.items():
        write("gauge", name, help, lambda stats, read=read: [({}, read(stats))])  # type: ignore[misc]
    for key, (name, help) in _COUNTERS.items():
        write("counter", name, help, lambda stats, key=key: [({}, stats.counters[key])])  # type: ignore[misc]
    for name, help, suffix in _HOST_COUNTERS:
        write("counter", name, help, _by_direction(suffix))
    for name, help, suffix in _STEP_COUNTERS:
        write("counter", name, help, _by_method(_count, suffix))
    write(
        "counter", "tgi_batch_inference_success", "Steps that worked.",
        _by_method(lambda stats, method: sum(stats.steps[method])),
    )  # fmt: skip
    write(
        "counter", "tgi_batch_concat", "Steps in which sequences joined running ones.",
        lambda stats: [({"reason": reason}, count) for reason, count in stats.joined_by.items()],
    )  # fmt: skip
    for prefix, families in (("peer_", _PEERS), ("folder_", _FOLDER)):
        if any(key.startswith(prefix) for stats in engines.values() for key in stats.counters):
            for name, help, label, keys in families:
                write("counter", name, help, _with_prefix(prefix, label, keys))
    if any("folder_pages" in stats.counters for stats in engines.values()):
        for name, help, key in _FOLDER_GAUGES:
            write("gauge", name, help, lambda stats, key=key: [({}, stats.counters[key])])  # type: ignore[misc]
    for name, help, suffix in _STEP_DURATIONS:
        write("histogram", name, help, _by_method(_durations, suffix))
    write(
        "histogram", "tgi_batch_concat_duration", "Seconds to plan a step in which sequences join.",
        lambda stats: [({"method": "decode"}, _durations(stats, "join"))],
    )  # fmt: skip
    write(
        "histogram", "tgi_batch_next_size", "Sequences that began in a step.",
        lambda stats: [({}, Histogram(BATCH_SIZES, stats.batch_sizes, stats.batch_size_sum))],
    )  # fmt: skip


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _count(stats: Stats, key: str) -> int:
    return stats.counters[key]


def _with_prefix(prefix: str, label: str, keys: str | dict[str, str]) -> Callable[[Stats], list[tuple[Labels, int]]]:
    """The counts below `prefix` by value of `label`: those with these keys, or with keys that begin so. A server has
    those of its role."""

    def find(stats: Stats) -> list[tuple[Labels, int]]:
        found = {key.removeprefix(prefix): count for key, count in stats.counters.items() if key.startswith(prefix)}
        if isinstance(keys, str):
            return [({label: key.removeprefix(keys)}, count) for key, count in found.items() if key.startswith(keys)]
        return [({label: value}, found[key]) for value, key in keys.items() if key in found]

    return find


def _durations(stats: Stats, key: str) -> Histogram:
    return Histogram(DURATIONS_S, stats.steps[key], stats.step_seconds[key])


def _by_method(find: Callable[[Stats, str], T], suffix: str = "") -> Callable[[Stats], list[tuple[Labels, T]]]:
    return lambda stats: [({"method": method}, find(stats, method + suffix)) for method in ("prefill", "decode")]


def _by_direction(suffix: str) -> Callable[[Stats], list[tuple[Labels, int]]]:
    directions = {"to_host": "saved", "from_host": "restored"}
    return lambda stats: [({"direction": name}, stats.counters[key + suffix]) for name, key in directions.items()]


def sum_stats(engines: Sequence[Stats]) -> Stats:
    """Merge the reports of several engines: counts are added, times are those of the engine that has waited longest."""
    if len(engines) == 1:
        return engines[0]
    slowest = max(engines, key=lambda stats: stats.waited_s)

    def total(name: str) -> Any:
        return _sum([getattr(stats, name) for stats in engines])

    return msgspec.structs.replace(
        slowest,
        idle_s=min(stats.idle_s for stats in engines),
        error=next((stats.error for stats in engines if stats.error is not None), None),
        **{name: total(name) for name in SUMMED},
        **{name: sorted({one for stats in engines for one in getattr(stats, name)}) for name in JOINED},
    )


SUMMED = (
    "num_running", "num_slots", "num_waiting", "running_max_tokens", "free_pages", "cached_pages", "num_pages",
    "max_total_tokens", "counters", "steps", "step_seconds", "batch_sizes", "batch_size_sum", "joined_by",
    "max_adapters",
)  # fmt: skip
JOINED = ("running_adapters", "waiting_adapters")


def _sum(values: Sequence[Any]) -> Any:
    """The sum of numbers. Lists and dictionaries are added element by element."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _sum([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [sum(column) for column in zip(*values, strict=True)]
    return sum(values)
