"""Metrics of one HTTP worker."""

import time
from collections.abc import Iterable, Sequence
from weakref import WeakSet

from quire.errors import ENGINES_FAILURES, InvalidRequest, Overloaded, QuireError, RateLimited, TemplateFailed
from quire.ipc.worker_counts import Counts
from quire.retry_reservations import MAX_WAIT_S
from quire.server.caller import key_name
from quire.server.observe.exposition import Exposition, Histogram
from quire.server.observe.request_record import RequestRecord

DURATIONS_S = tuple(0.00015 * 1.5**k for k in range(35))
INTER_TOKEN_S = tuple(0.0005 * 1.5**k for k in range(24))
COUNTERS = {
    "tgi_request_count": "Requests that arrived.",
    "tgi_request_success": "Requests that were answered.",
    "quire_prompt_tokens": "Tokens of prompts.",
    "quire_cached_tokens": "Tokens of prompts found in the prefix cache.",
    "quire_generated_tokens": "Tokens generated.",
}
HISTOGRAMS = {
    "tgi_request_duration": "Seconds from a request's arrival to its end.",
    "tgi_request_validation_duration": "Seconds spent on checking and tokenising.",
    "tgi_request_queue_duration": "Seconds spent waiting for a slot.",
    "tgi_request_inference_duration": "Seconds from the slot to the end.",
    "tgi_request_mean_time_per_token_duration": "Seconds per token of a request.",
    "tgi_request_input_length": "Tokens of prompts.",
    "tgi_request_max_new_tokens": "Tokens asked for.",
    "tgi_request_generated_tokens": "Tokens generated.",
    "tgi_request_skipped_tokens": "Right guesses that came with each token that took a step.",
    "quire_time_to_first_token_seconds": "Seconds from arrival to the first token.",
    "quire_inter_token_seconds": "Seconds between the tokens of a request.",
    "quire_detokenize_seconds": "Seconds to turn the tokens of a step into text.",
}
KEY_COUNTERS = {
    "quire_key_requests": "Requests that ran, by API key.",
    "quire_key_rate_limited": "Requests refused by the limits of their API key.",
    "quire_key_prompt_tokens": "Tokens of prompts, by API key.",
    "quire_key_cached_tokens": "Tokens of prompts found in the prefix cache, by API key.",
    "quire_key_generated_tokens": "Tokens generated, by API key.",
}
FAILURES = ("validation", "overloaded", "generation", "incomplete", "dropped", "template")


class Metrics:
    """Counts by metric name. Owned by the worker's event loop."""

    def __init__(
        self, max_total_tokens: int, max_input_tokens: int, max_guesses: int = 0, keys: Sequence[str] = ()
    ) -> None:
        """`keys` are the names of the API keys."""
        lengths = _hundredths(max_total_tokens)
        bounds: dict[str, Sequence[float]] = {
            "tgi_request_input_length": _hundredths(max_input_tokens),
            "tgi_request_skipped_tokens": range(max_guesses + 1),
            "quire_inter_token_seconds": INTER_TOKEN_S,
        }
        self.numbers = dict.fromkeys(COUNTERS, 0)
        self.histograms = {
            name: Histogram(bounds.get(name, DURATIONS_S if name.endswith(("_duration", "_seconds")) else lengths))
            for name in HISTOGRAMS
        }
        self.inter_token = self.histograms["quire_inter_token_seconds"]
        self.time_to_first_token = self.histograms["quire_time_to_first_token_seconds"]
        self.detokenizing = self.histograms["quire_detokenize_seconds"]
        self.failures = dict.fromkeys(FAILURES, 0)
        self.keys = {name: dict.fromkeys(KEY_COUNTERS, 0) for name in keys}
        self._noted: WeakSet[QuireError] = WeakSet()
        self._turn = 0
        self._last_end_s: float | None = None
        self.end_interval_s = 0.0  # between ends of requests, averaged over the last few

    def note_arrival(self) -> None:
        self.numbers["tgi_request_count"] += 1

    def note_error(self, error: QuireError) -> bool:
        """Count an error once, although a stream and the route that reads it both report it. True if it is new."""
        if error in self._noted:
            return False
        self._noted.add(error)
        self.failures[failure_name(error)] += 1
        if isinstance(error, RateLimited) and key_name.get() in self.keys:
            self.keys[key_name.get()]["quire_key_rate_limited"] += 1
        return True

    def note_dropped(self) -> None:
        """The client of a request has left."""
        self.failures["dropped"] += 1

    def note_request(self, record: RequestRecord) -> None:
        """A request is over: answered, failed, or dropped by its client."""
        self._note_end(time.monotonic())
        self.numbers["quire_generated_tokens"] += record.num_generated_tokens
        self.numbers["quire_prompt_tokens"] += record.num_prompt_tokens
        self.numbers["quire_cached_tokens"] += record.num_cached_tokens
        if record.key_name in self.keys:
            self._note_key(record)
        if record.error is not None:
            self.note_error(record.error)
        elif not record.is_complete:
            self.note_dropped()
        else:
            self._note_answer(record)

    def _note_key(self, record: RequestRecord) -> None:
        counts = self.keys[record.key_name]
        counts["quire_key_requests"] += 1
        counts["quire_key_prompt_tokens"] += record.num_prompt_tokens
        counts["quire_key_cached_tokens"] += record.num_cached_tokens
        counts["quire_key_generated_tokens"] += record.num_generated_tokens

    def _note_answer(self, record: RequestRecord) -> None:
        times, num_tokens = record.times, record.num_generated_tokens
        self.numbers["tgi_request_success"] += 1
        for name, value in (
            ("duration", times.total_s),
            ("validation_duration", times.validation_s),
            ("queue_duration", times.queue_s),
            ("inference_duration", times.inference_s),
            ("mean_time_per_token_duration", times.per_token_s(num_tokens)),
            ("input_length", record.num_prompt_tokens),
            ("max_new_tokens", record.max_new_tokens),
            ("generated_tokens", num_tokens),
        ):
            self.histograms[f"tgi_request_{name}"].observe(value)
        # For each token that took a step: the right guesses that came with it.
        num_left = num_tokens
        for num_right, num_steps in record.right_guesses.items():
            self.histograms["tgi_request_skipped_tokens"].observe(num_right, num_steps)
            num_left -= (num_right + 1) * num_steps
        self.histograms["tgi_request_skipped_tokens"].observe(0, max(0, num_left))  # fewer where a stop string cut it

    def _note_end(self, now: float) -> None:
        if self._last_end_s is not None:
            interval_s = min(now - self._last_end_s, MAX_WAIT_S)  # nights say nothing about busy hours
            self.end_interval_s += 0.2 * (interval_s - self.end_interval_s)
        self._last_end_s = now

    def counts(self) -> Counts:
        """All counts as plain data, for the other workers."""
        histograms = {name: (histogram.counts, histogram.sum) for name, histogram in self.histograms.items()}
        self._turn += 1
        return Counts(self._turn, self.numbers, histograms, self.failures, self.keys)

    def write(self, out: Exposition, others: Iterable[Counts] = ()) -> None:
        """The sums over this worker and the others."""
        workers = [self.counts(), *others]
        for name, help in COUNTERS.items():
            out.counter(name, help, sum(one.numbers[name] for one in workers))
        failures = {err: sum(one.failures.get(err, 0) for one in workers) for err in FAILURES}
        out.counter("tgi_request_failure", "Requests that were not answered.", failures, "err")
        for name, help in KEY_COUNTERS.items() if self.keys else ():
            out.counter(name, help, {key: sum(one.keys[key][name] for one in workers) for key in self.keys}, "key")
        for name, help in HISTOGRAMS.items():
            counted = [one.histograms[name] for one in workers]
            counts = [sum(column) for column in zip(*(counts for counts, _ in counted), strict=True)]
            total = sum(total for _, total in counted)
            out.histogram(name, help, Histogram(self.histograms[name].bounds, counts, total))


def _hundredths(limit: int) -> list[float]:
    return [limit * k / 100 for k in range(1, 101)]


def failure_name(error: QuireError) -> str:
    """The name that text-generation-inference has for this kind of failure."""
    if isinstance(error, InvalidRequest):
        return "template" if isinstance(error, TemplateFailed) else "validation"
    if isinstance(error, Overloaded):
        return "overloaded"
    return "generation" if isinstance(error, ENGINES_FAILURES) else "incomplete"
