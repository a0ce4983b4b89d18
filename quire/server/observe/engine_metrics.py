"""Metrics of the engine process."""

from collections.abc import Callable
from typing import TypeVar

from quire.ipc.messages import BATCH_SIZES, DURATIONS_S, Stats
from quire.server.observe.exposition import Exposition, Histogram

T = TypeVar("T")

_COUNTERS = {
    "preemptions": ("quire_preemptions", "Sequences that lost their pages to older ones."),
    "evicted_pages": ("quire_evicted_pages", "Cached pages given up for others."),
    "cached_tokens": ("quire_prefix_hit_tokens", "Tokens found in the prefix cache when a sequence was admitted."),
    "faults": ("quire_step_faults", "Steps that failed, and failed checks of an idle device."),
    "requests_blamed": ("quire_faults_isolated", "Requests that made their steps fail and were ended alone."),
    "shrinks": ("quire_step_shrinks", "Times that steps were made smaller because the device ran out of memory."),
    "repairs": ("quire_page_repairs", "Times that the accounting of pages was wrong and was reset."),
    "restarts": ("quire_engine_restarts", "Engine processes that ended and were restarted."),
    "padding_tokens": ("quire_step_padding_tokens_total", "Tokens computed beyond those of the steps, as padding."),
    "late_compilations": ("quire_late_compilations", "Programs compiled while requests waited for them."),
}
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


def write_engine(out: Exposition, stats: Stats) -> None:
    for gauge, help, value in (
        ("tgi_queue_size", "Sequences that wait.", stats.num_waiting),
        ("tgi_batch_current_size", "Sequences that run.", stats.num_running),
        (
            "tgi_batch_current_max_tokens",
            "Tokens that running sequences may have in the end.",
            stats.running_max_tokens,
        ),
        ("tgi_batch_max_total_tokens", "Tokens that may run together.", stats.max_total_tokens),
        ("quire_pages_free", "Pages that hold nothing.", stats.free_pages),
        ("quire_pages_active", "Pages that sequences use.", stats.active_pages),
        ("quire_pages_cached", "Pages that only the prefix cache holds.", stats.cached_pages),
        ("quire_last_step_age_seconds", "Seconds since the last step that finished.", stats.idle_s),
    ):
        out.gauge(gauge, help, value)
    for key, (name, help) in _COUNTERS.items():
        out.counter(name, help, stats.counters[key])
    for name, help, suffix in _STEP_COUNTERS:
        counts = _by_method(lambda method, suffix=suffix: stats.counters[method + suffix])  # type: ignore[misc]
        out.counter(name, help, counts, "method")
    worked = _by_method(lambda method: sum(stats.steps[method]))
    out.counter("tgi_batch_inference_success", "Steps that worked.", worked, "method")
    out.counter("tgi_batch_concat", "Steps in which sequences began beside others.", stats.joined_by, "reason")

    def durations(key: str) -> Histogram:
        return Histogram(DURATIONS_S, stats.steps[key], stats.step_seconds[key])

    for name, help, suffix in _STEP_DURATIONS:
        histograms = _by_method(lambda method, suffix=suffix: durations(method + suffix))  # type: ignore[misc]
        out.histogram(name, help, histograms, "method")
    joins = {"decode": durations("join")}
    out.histogram("tgi_batch_concat_duration", "Seconds to plan a step in which sequences join.", joins, "method")
    sizes = Histogram(BATCH_SIZES, stats.batch_sizes, stats.batch_size_sum)
    out.histogram("tgi_batch_next_size", "Sequences that began in a step.", sizes)


def _by_method(find: Callable[[str], T]) -> dict[str, T]:
    return {method: find(method) for method in ("prefill", "decode")}
