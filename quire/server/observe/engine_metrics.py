"""What the engine process counts, as metrics."""

from quire.engine.meter import BATCH_SIZES, DURATIONS_S
from quire.ipc.messages import Stats
from quire.server.observe.exposition import Exposition, Histogram

_COUNTERS = {
    "preemptions": ("quire_preemptions", "Sequences that lost their pages to older ones."),
    "evicted_pages": ("quire_evicted_pages", "Cached pages given up for others."),
    "cached_tokens": ("quire_prefix_hit_tokens", "Tokens found in the prefix cache when a sequence was admitted."),
    "faults": ("quire_step_faults", "Steps that failed, and checks of an idle device that did."),
    "requests_blamed": ("quire_faults_isolated", "Requests that made their steps fail and were ended alone."),
    "shrinks": ("quire_step_shrinks", "Times that steps were made smaller, since the device ran out of memory."),
    "repairs": ("quire_page_repairs", "Times that the accounts of pages were wrong, and begun anew."),
    "restarts": ("quire_engine_restarts", "Engine processes that ended and were started again."),
    "padding_tokens": ("quire_step_padding_tokens_total", "Tokens computed beyond those of the steps, as padding."),
    "late_compilations": ("quire_late_compilations", "Programs compiled while requests waited for them."),
}


def write_engine(page: Exposition, stats: Stats) -> None:
    page.gauge("tgi_queue_size", "Sequences that wait.", stats.num_waiting)
    page.gauge("tgi_batch_current_size", "Sequences that run.", stats.num_running)
    page.gauge(
        "tgi_batch_current_max_tokens",
        "Tokens of the prompts that run, and that they may generate.",
        stats.running_max_tokens,
    )
    page.gauge("tgi_batch_max_total_tokens", "Tokens that may run together.", stats.max_total_tokens)
    page.gauge("quire_pages_free", "Pages that hold nothing.", stats.free_pages)
    active = stats.num_pages - stats.free_pages - stats.cached_pages
    page.gauge("quire_pages_active", "Pages that sequences use.", active)
    page.gauge("quire_pages_cached", "Pages that only the prefix cache holds.", stats.cached_pages)
    page.gauge("quire_last_step_age_seconds", "Since the last step that finished.", stats.idle_s)
    for key, (name, help) in _COUNTERS.items():
        page.counter(name, help, stats.counters[key])
    kinds = ("prefill", "decode")
    tokens = {kind: float(stats.counters[f"{kind}_tokens"]) for kind in kinds}
    page.counters("quire_step_tokens", "Tokens computed.", "method", tokens)
    steps = {kind: _histogram(DURATIONS_S, stats.steps[kind], stats.step_seconds[kind]) for kind in kinds}
    worked = {kind: float(steps[kind].count) for kind in kinds}
    failed = {kind: float(stats.counters[f"{kind}_failed"]) for kind in kinds}
    begun = {kind: float(stats.counters[f"{kind}_begun"]) for kind in kinds}
    page.counters("tgi_batch_inference_count", "Steps begun.", "method", begun)
    page.counters("tgi_batch_inference_success", "Steps that worked.", "method", worked)
    page.counters("tgi_batch_inference_failure", "Steps that failed, or were discarded.", "method", failed)
    page.histograms("tgi_batch_forward_duration", "Seconds that the device took for a step.", "method", steps)
    joined_by = {reason: float(count) for reason, count in stats.joined_by.items()}
    page.counters("tgi_batch_concat", "Steps in which sequences began beside others.", "reason", joined_by)

    def host(what: str) -> Histogram:
        return _histogram(DURATIONS_S, stats.steps[what], stats.step_seconds[what])

    whole = {kind: host(f"{kind}_inference") for kind in kinds}
    page.histograms(
        "tgi_batch_inference_duration", "Seconds from planning a step to handing out its tokens.", "method", whole
    )
    taken_in = {kind: host(f"{kind}_complete") for kind in kinds}
    page.histograms("tgi_batch_decode_duration", "Seconds to take in the tokens of a step.", "method", taken_in)
    handed_out = {kind: host(f"{kind}_deliver") for kind in kinds}
    page.histograms("tgi_batch_filter_duration", "Seconds to hand out the tokens of a step.", "method", handed_out)
    joined = {"decode": host("join")}
    page.histograms(
        "tgi_batch_concat_duration", "Seconds to plan a step in which sequences join others.", "method", joined
    )
    sizes = _histogram(BATCH_SIZES, stats.batch_sizes, stats.batch_size_sum)
    page.histogram("tgi_batch_next_size", "Sequences that began in a step.", sizes)


def _histogram(bounds: tuple[float, ...], counts: list[int], total: float) -> Histogram:
    histogram = Histogram(bounds)
    histogram.counts = counts
    histogram.sum = total
    return histogram
